"""MAE's training: gates and experts updated in turn (MAE §3), and fine-tuning (§5.2)."""
