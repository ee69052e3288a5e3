"""Chat templates of the shapes that real families have, by what they show and what they drop or refuse."""

from __future__ import annotations

# ruff: noqa: E501  (as templates are written)

_DEEPSEEK_CALL = (
    "<｜tool▁call▁begin｜>function<｜tool▁sep｜>{{ c.function.name }}\n```json\n{{ c.function.arguments%s }}\n```"
    "<｜tool▁call▁end｜>"
)
_ALTERNATES = "{{ raise_exception('after user comes assistant') }}"

# Without tools: three roles are printed, all others are dropped (zephyr, Yi 1.5, Phi 3).
THREE_ROLES = (
    "{% for m in messages %}{% if m.role == 'system' or m.role == 'user' or m.role == 'assistant' %}"
    "<|{{ m.role }}|>\n{{ m.content }}{{ eos_token }}\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)
# User and assistant take turns, and there is no system message (Mistral 0.1, Mixtral 0.1).
ALTERNATING = (
    "{{ bos_token }}{% for m in messages %}"
    "{% if (m.role == 'user') != (loop.index0 is even) %}" + _ALTERNATES + "{% endif %}"
    "{% if m.role == 'user' %}[INST] {{ m.content }} [/INST]{% elif m.role == 'assistant' %}"
    "{{ m.content }}{{ eos_token }}{% else %}{{ raise_exception('a user or an assistant') }}{% endif %}"
    "{% endfor %}"
)
# As the one before, with one system message in the first turn of the user (Llama 2).
SYSTEM_IN_USER = (
    "{% set about = '' %}{% if messages[0].role == 'system' %}{% set about = messages[0].content %}"
    "{% set messages = messages[1:] %}{% endif %}{% for m in messages %}"
    "{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}" + _ALTERNATES + "{% endif %}"
    "{% if m.role == 'user' %}{{ bos_token }}[INST] {% if loop.first and about %}<<SYS>>{{ about }}<</SYS>>"
    "{% endif %}{{ m.content }} [/INST]{% else %}{{ m.content }}{{ eos_token }}{% endif %}{% endfor %}"
)
# A system message is an error (Gemma 2).
NO_SYSTEM = (
    "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no system role') }}{% endif %}"
    "{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}" + _ALTERNATES + "{% endif %}"
    "<turn>{{ 'model' if m.role == 'assistant' else m.role }}\n{{ m.content | trim }}<end>\n{% endfor %}"
    "{% if add_generation_prompt %}<turn>model\n{% endif %}"
)
# Each role under its name, any name (ChatML of SmolLM2 and many fine-tunes).
ANY_ROLE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# Tools are a key of the system message, and calls are not shown (Phi-4-mini).
KEY_OF_SYSTEM = (
    "{% for m in messages %}{% if m.role == 'system' and m['tools'] is defined %}"
    "<|system|>{{ m.content + '<|tool|>' + m['tools'] + '<|/tool|>' }}<|end|>"
    "{% else %}{{ '<|' + m.role + '|>' + m.content + '<|end|>' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
# No tools, and calls in a form of its own, beside a null content alone (DeepSeek-R1-Distill).
CALLS_BESIDE_NULL = (
    "{% for m in messages %}{% if m.role == 'system' %}{{ m.content }}{% elif m.role == 'user' %}<｜User｜>{{ m.content }}"
    "{% elif m.role == 'assistant' and m.content is none %}<｜Assistant｜><｜tool▁calls▁begin｜>"
    "{% for c in m.tool_calls %}" + _DEEPSEEK_CALL.replace("%s", "") + "{% endfor %}<｜tool▁calls▁end｜>"
    "{% elif m.role == 'assistant' %}<｜Assistant｜>{{ m.content.split('</think>')[-1] }}{{ eos_token }}"
    "{% elif m.role == 'tool' %}<｜tool▁output▁begin｜>{{ m.content }}<｜tool▁output▁end｜>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<｜Assistant｜><think>\n{% endif %}"
)
# The same family with tools, which writes arguments as JSON itself.
ARGUMENTS_TO_JSON = (
    "{% if tools %}{% for t in tools %}{{ t | tojson }}\n{% endfor %}{% endif %}"
    "{% for m in messages %}{% if m.role == 'user' %}<｜User｜>{{ m.content }}"
    "{% elif m.role == 'assistant' and m.tool_calls %}<｜Assistant｜><｜tool▁calls▁begin｜>"
    "{% for c in m.tool_calls %}" + _DEEPSEEK_CALL.replace("%s", " | tojson") + "{% endfor %}"
    "<｜tool▁calls▁end｜>{{ eos_token }}{% elif m.role == 'assistant' %}<｜Assistant｜>{{ m.content }}{{ eos_token }}"
    "{% elif m.role == 'tool' %}<｜tool▁output▁begin｜>{{ m.content }}<｜tool▁output▁end｜>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<｜Assistant｜>{% endif %}"
)
# Each argument in tags of its own (MiniCPM5).
FUNCTION_AND_PARAM = (
    "{% if tools %}<|im_start|>system\n{% for t in tools %}{{ t | tojson }}\n{% endfor %}<|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ 'user' if m.role == 'tool' else m.role }}\n"
    "{% if m.role == 'tool' %}<tool_response>{{ m.content }}</tool_response>{% else %}{{ m.content }}{% endif %}"
    '{% for c in m.tool_calls or [] %}<function name="{{ c.function.name }}">'
    '{% for k, v in c.function.arguments.items() %}<param name="{{ k }}">{{ v if v is string else v | tojson }}'
    "</param>{% endfor %}</function>{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n{% endif %}"
)
# All of it (Qwen 2.5).
HERMES = (
    "{% if tools %}<|im_start|>system\n{% if messages[0].role == 'system' %}{{ messages[0].content }}\n{% endif %}"
    "{% for t in tools %}{{ t | tojson }}\n{% endfor %}<|im_end|>\n{% endif %}{% for m in messages %}"
    "{% if m.role == 'tool' %}<|im_start|>user\n<tool_response>\n{{ m.content }}\n</tool_response><|im_end|>\n"
    "{% elif not (tools and loop.first and m.role == 'system') %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    '{% for c in m.tool_calls or [] %}\n<tool_call>\n{"name": "{{ c.function.name }}", "arguments": '
    "{{ c.function.arguments | tojson }}}\n</tool_call>{% endfor %}<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# One call in a message, without text beside it (Llama 3.1).
ONE_CALL = (
    "{% if tools %}<|start_header_id|>system<|end_header_id|>{% for t in tools %}{{ t | tojson }}{% endfor %} Answer "
    '{"name": function name, "parameters": arguments}<|eot_id|>{% endif %}{% for m in messages %}'
    "{% if m.tool_calls %}{% if m.tool_calls | length != 1 %}{{ raise_exception('one call at once') }}{% endif %}"
    '<|start_header_id|>assistant<|end_header_id|>\n\n{"name": "{{ m.tool_calls[0].function.name }}", '
    '"parameters": {{ m.tool_calls[0].function.arguments | tojson }}}<|eot_id|>'
    "{% else %}<|start_header_id|>{{ 'ipython' if m.role == 'tool' else m.role }}<|end_header_id|>\n\n{{ m.content }}<|eot_id|>"
    "{% endif %}{% endfor %}{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)
# Ids of nine letters, and no turn of the user after a result (Mistral Nemo).
SHORT_IDS = (
    "{% set ns = namespace(i=0) %}{% for m in messages if m.role in ['user', 'assistant'] and not m.tool_calls %}"
    "{% if (m.role == 'user') != (ns.i % 2 == 0) %}"
    + _ALTERNATES
    + "{% endif %}{% set ns.i = ns.i + 1 %}{% endfor %}"
    "{% for m in messages %}{% if m.role == 'user' %}"
    "{% if tools and loop.last or tools and loop.first %}[AVAILABLE_TOOLS]{{ tools | tojson }}[/AVAILABLE_TOOLS]{% endif %}"
    "[INST]{{ m.content }}[/INST]{% elif m.tool_calls %}[TOOL_CALLS][{% for c in m.tool_calls %}"
    "{% if c.id | length != 9 %}{{ raise_exception('ids have nine letters') }}{% endif %}"
    '{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}, "id": "{{ c.id }}"}'
    "{{ ', ' if not loop.last }}{% endfor %}]{{ eos_token }}{% elif m.role == 'tool' %}"
    "{% if m.tool_call_id | length != 9 %}{{ raise_exception('ids have nine letters') }}{% endif %}"
    "[TOOL_RESULTS]{{ m.content }} {{ m.tool_call_id }}[/TOOL_RESULTS]{% elif m.role == 'assistant' %}{{ m.content }}{{ eos_token }}"
    "{% else %}{{ raise_exception('roles') }}{% endif %}{% endfor %}"
)
# A call is shown under its id alone (Kimi K2 Thinking).
ID_IS_NAME = (
    "{% if tools %}<|im_system|>{{ tools | tojson }}<|im_end|>{% endif %}{% for m in messages %}"
    "<|im_{{ m.role if m.role in ['user', 'assistant'] else 'system' }}|>{{ m.role }}<|im_middle|>"
    "{% if m.role == 'tool' %}## Return of {{ m.tool_call_id }}\n{% endif %}{{ m.content }}"
    "{% if m.tool_calls %}<|tool_calls_section_begin|>{% for c in m.tool_calls %}<|tool_call_begin|>{{ c.id }}"
    "<|tool_call_argument_begin|>{{ c.function.arguments | tojson }}<|tool_call_end|>{% endfor %}"
    "<|tool_calls_section_end|>{% endif %}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}<|im_assistant|>assistant<|im_middle|>{% endif %}"
)
# Contents are lists of parts (vision models).
LISTS_OF_PARTS = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% for part in m.content %}{{ part.text }}{% endfor %}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

SHAPES = {
    "three roles": THREE_ROLES,
    "alternating": ALTERNATING,
    "system in user": SYSTEM_IN_USER,
    "no system": NO_SYSTEM,
    "any role": ANY_ROLE,
    "key of system": KEY_OF_SYSTEM,
    "calls beside null": CALLS_BESIDE_NULL,
    "arguments to json": ARGUMENTS_TO_JSON,
    "function and param": FUNCTION_AND_PARAM,
    "hermes": HERMES,
    "one call": ONE_CALL,
    "short ids": SHORT_IDS,
    "id is name": ID_IS_NAME,
    "lists of parts": LISTS_OF_PARTS,
}
