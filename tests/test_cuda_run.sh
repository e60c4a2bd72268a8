#!/usr/bin/env bash
# Whole runs of the CUDA trainer: test_run.cpp once more, through the emulator (or the
# program that CUDA_TRAINER names).
trainer=${CUDA_TRAINER:-build/train_emulated}
if [ ! -x "$trainer" ]; then
  echo "skip whole runs of the CUDA trainer: no $trainer"
  echo "0 passed, 0 failed, 1 skipped"
  exit 0
fi
exec build/test_run "$trainer"
