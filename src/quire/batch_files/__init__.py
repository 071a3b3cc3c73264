"""Files of prompts and files of answers, both JSON lines: reading, running and resuming them."""
