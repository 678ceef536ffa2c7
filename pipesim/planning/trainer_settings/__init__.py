"""Configurations of Megatron-LM and torchtitan, read from their flags and settings."""
