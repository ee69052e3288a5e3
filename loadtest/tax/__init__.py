"""What preemption costs in tokens computed twice: the protocol of vllm-project/vllm#54644."""
