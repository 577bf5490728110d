"""What training and serving must agree on: rendering, forward pass, checkpoint. Import from its modules."""
