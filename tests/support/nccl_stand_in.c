// What NCCL 2.29.7 says about suspending, without a GPU: communicators are small numbers instead of addresses.
#include <stdint.h>
#include <stdio.h>
#include <string.h>

enum { SUCCESS = 0, UNHANDLED_CUDA_ERROR = 1, INVALID_ARGUMENT = 4, INVALID_USAGE = 5, NUM_COMMUNICATORS = 8, BROKEN = 7 };

static int is_suspended[NUM_COMMUNICATORS];
static char record[4096];
static const char *last_error = "";

static int told(const char *verb, intptr_t communicator) {
  size_t used = strlen(record);
  snprintf(record + used, sizeof record - used, "%s %d\n", verb, (int)communicator);
  return SUCCESS;
}

const char *calls(void) { return record; }

const char *ncclGetLastError(void *communicator) {
  (void)communicator;
  return last_error;
}

int ncclCommSuspend(void *communicator, int flags) {
  intptr_t number = (intptr_t)communicator;
  if (flags != 1) return INVALID_ARGUMENT;
  if (is_suspended[number]) {
    last_error = "MemManager: Already suspended";
    return INVALID_USAGE;
  }
  is_suspended[number] = 1;
  return told("suspend", number);
}

int ncclCommResume(void *communicator) {
  intptr_t number = (intptr_t)communicator;
  if (!is_suspended[number]) {
    last_error = "MemManager: Not in suspended state";
    return INVALID_USAGE;
  }
  if (number == BROKEN) {
    last_error = "Cuda failure 2 'out of memory'";
    return UNHANDLED_CUDA_ERROR;
  }
  is_suspended[number] = 0;
  return told("resume", number);
}

int ncclCommMemStats(void *communicator, int stat, uint64_t *value) {
  if (stat != 0) return INVALID_ARGUMENT;
  *value = 1000 * (uint64_t)(intptr_t)communicator;
  return SUCCESS;
}
