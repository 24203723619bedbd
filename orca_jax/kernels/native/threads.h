// Blocks of a matrix that several threads of XLA's pool multiply. Each takes some of them by an atomic counter.

#include <sched.h>
#include <stdatomic.h>
#include <stdlib.h>

#include "ffi.h"

#define SMALL (256 << 10)  // bytes of a matrix that one thread multiplies alone

typedef void Multiply(const void *product, int64_t begin, int64_t end);

// The last thread to leave frees it, since some may come when all is done. These do not read the product any more.
typedef struct {
  Multiply *multiply;
  const void *product;
  int64_t blocks, at_once;
  atomic_llong next, done;
  atomic_int holders;
} Shared;

static void leave(Shared *shared) {
  if (atomic_fetch_sub(&shared->holders, 1) == 1) free(shared);
}

static void take_blocks(Shared *shared) {
  for (;;) {
    const int64_t begin = atomic_fetch_add(&shared->next, shared->at_once);
    if (begin >= shared->blocks) return;
    const int64_t end = begin + shared->at_once < shared->blocks ? begin + shared->at_once : shared->blocks;
    shared->multiply(shared->product, begin, end);
    atomic_fetch_add(&shared->done, end - begin);
  }
}

static void help(void *shared) {
  take_blocks(shared);
  leave(shared);
}

static void discard(const XLA_FFI_Api *api, XLA_FFI_Error *error) {
  XLA_FFI_Error_Destroy_Args args = {XLA_FFI_Error_Destroy_Args_STRUCT_SIZE, NULL, error};
  api->XLA_FFI_Error_Destroy(&args);
}

// The threads of XLA's pool beside this one, if all devices have as many.
static int64_t num_helpers(XLA_FFI_CallFrame *frame, int64_t devices) {
  int64_t threads = 1;
  XLA_FFI_ThreadPool_NumThreads_Args args = {XLA_FFI_ThreadPool_NumThreads_Args_STRUCT_SIZE, NULL, frame->ctx,
                                             &threads};
  XLA_FFI_Error *error = frame->api->XLA_FFI_ThreadPool_NumThreads(&args);
  if (error != NULL) {
    discard(frame->api, error);
    return 0;
  }
  return threads / devices - 1;
}

// Multiply all blocks of a matrix of so many bytes. It is done when this function returns.
static void share_blocks(XLA_FFI_CallFrame *frame, Multiply *multiply, const void *product, int64_t blocks,
                         int64_t bytes, int64_t devices) {
  int64_t helpers = bytes <= SMALL ? 0 : num_helpers(frame, devices);
  if (helpers > blocks - 1) helpers = blocks - 1;
  Shared *shared = helpers > 0 ? malloc(sizeof(Shared)) : NULL;
  if (shared == NULL) {
    multiply(product, 0, blocks);
    return;
  }
  *shared = (Shared){
      .multiply = multiply, .product = product, .blocks = blocks, .at_once = 1 + blocks / (8 * (helpers + 1))};
  atomic_init(&shared->holders, 1 + (int)helpers);
  for (; helpers > 0; helpers--) {
    XLA_FFI_ThreadPool_Schedule_Args args = {XLA_FFI_ThreadPool_Schedule_Args_STRUCT_SIZE, NULL, frame->ctx, help,
                                             shared};
    XLA_FFI_Error *error = frame->api->XLA_FFI_ThreadPool_Schedule(&args);
    if (error != NULL) {
      discard(frame->api, error);
      leave(shared);
    }
  }
  take_blocks(shared);
  while (atomic_load(&shared->done) < blocks) sched_yield();  // others compute the last blocks
  leave(shared);
}
