"""The cost of preemption in tokens computed twice: the protocol of vllm-project/vllm#54644."""
