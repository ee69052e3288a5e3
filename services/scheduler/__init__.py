"""The scheduler owns every request and every KV block. Its core uses neither tensors nor a clock."""
