"""PPO: acting, rollouts, the update, checkpoints, and whole training runs."""
