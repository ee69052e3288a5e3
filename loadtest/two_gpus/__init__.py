"""What two GPUs of one host give: ranks and stages of one model, and two executors."""
