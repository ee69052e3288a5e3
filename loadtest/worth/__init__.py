"""Whether tiers below the device are worth it: chats that come back, prompts that do not, the break-even."""
