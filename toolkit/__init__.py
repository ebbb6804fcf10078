"""Plan, launch, train and resume Hugging Face models on DeepSpeed under any parallel strategy."""
