"""The names on spans: OpenTelemetry's semantic conventions as far as they are used, and our own.

Sources: semantic conventions for generative AI and for messaging (both in development, hence one file
to follow them in), for errors and for resources. Written out rather than imported: the package that
holds them is large, and marks these names deprecated whenever they move.
"""

from __future__ import annotations

# generative AI
GEN_AI_OPERATION = "gen_ai.operation.name"
GEN_AI_PROVIDER = "gen_ai.provider.name"
GEN_AI_REQUEST_MODEL = "gen_ai.request.model"
GEN_AI_REQUEST_CHOICES = "gen_ai.request.choice.count"
GEN_AI_RESPONSE_MODEL = "gen_ai.response.model"
GEN_AI_RESPONSE_ID = "gen_ai.response.id"
GEN_AI_FINISH_REASONS = "gen_ai.response.finish_reasons"
GEN_AI_FIRST_CHUNK_S = "gen_ai.response.time_to_first_chunk"
GEN_AI_INPUT_TOKENS = "gen_ai.usage.input_tokens"
GEN_AI_OUTPUT_TOKENS = "gen_ai.usage.output_tokens"
GEN_AI_CACHED_TOKENS = "gen_ai.usage.cache_read.input_tokens"
OPERATIONS = {"chat": "chat", "completion": "text_completion"}  # Open.format -> gen_ai.operation.name
PROVIDER = "headrace"

# messaging
MESSAGING_SYSTEM = "messaging.system"
MESSAGING_DESTINATION = "messaging.destination.name"
MESSAGING_TEMPLATE = "messaging.destination.template"
MESSAGING_TEMPORARY = "messaging.destination.temporary"
MESSAGING_OPERATION = "messaging.operation.name"
MESSAGING_OPERATION_TYPE = "messaging.operation.type"
MESSAGING_GROUP = "messaging.consumer.group.name"
MESSAGING_MESSAGE_ID = "messaging.message.id"
NATS = "nats"
GENERATE_TEMPLATE = "headrace.v1.generate.{tenant}.{model}"

# HTTP
HTTP_METHOD = "http.request.method"
HTTP_ROUTE = "http.route"
HTTP_STATUS = "http.response.status_code"

# errors and resources
ERROR_TYPE = "error.type"
SERVICE_NAME = "service.name"
SERVICE_INSTANCE = "service.instance.id"

# our own: also on spans, since not every viewer shows resources and links
COMPONENT = "component"  # the service whose time it is
REQUEST_ID = "request.id"
TENANT = "tenant"
BATCH_ID = "batch.id"  # <executor>:<step>, the same on a step and on the chunks in it
EXECUTOR = "executor"
CHOICE = "choice"
STEP = "step"
STEPS = "steps"
TOKENS = "tokens"
TOKENS_PER_SECOND = "tokens_per_second"
ROWS = "rows"
PREFILL_TOKENS = "prefill_tokens"
OVERLAP_MODE = "overlap.mode"
OVERLAP_COMM = "overlap.comm"
MICRO_BATCH = "micro_batch"
FORWARD_US = "forward_us"
SAMPLE_US = "sample_us"
WAIT_US = "wait_us"
WHY = "why"


def batch_id(executor: str, step: int) -> str:
    """What names one step of one executor."""
    return f"{executor}:{step}"
