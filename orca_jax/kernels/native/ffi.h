// Calls from XLA (its "foreign function interface").

#include <stddef.h>
#include <stdint.h>

#include "xla/ffi/api/c_api.h"

// True for the call with which XLA asks for the version of its interface; this function answers it.
static inline int is_query(XLA_FFI_CallFrame *frame) {
  XLA_FFI_InternalExtension *extension = frame->extension_start;
  if (extension == NULL || extension->type != XLA_FFI_Extension_Metadata) return 0;
  XLA_FFI_Metadata *metadata = ((XLA_FFI_Metadata_Extension *)extension)->metadata;
  metadata->api_version.major_version = XLA_FFI_API_MAJOR;
  metadata->api_version.minor_version = XLA_FFI_API_MINOR;
  return 1;
}

static inline XLA_FFI_Error *refuse(XLA_FFI_CallFrame *frame, const char *message) {
  XLA_FFI_Error_Create_Args args = {XLA_FFI_Error_Create_Args_STRUCT_SIZE, NULL, message,
                                    XLA_FFI_Error_Code_INVALID_ARGUMENT};
  return frame->api->XLA_FFI_Error_Create(&args);
}

// A matrix of a stack, and the number of the first rows of x that it multiplies. Nothing is written for other rows.
typedef struct {
  int64_t layer, rows;
} Place;

// True if the argument is the place of a matrix in this stack.
static inline int read_place(Place *place, const XLA_FFI_Buffer *given, const XLA_FFI_Buffer *stack, int64_t rows) {
  if (given->dtype != XLA_FFI_DataType_S32 || given->rank != 1 || given->dims[0] != 2 || stack->rank < 1) return 0;
  const int32_t *numbers = given->data;
  *place = (Place){numbers[0], numbers[1] < rows ? numbers[1] : rows};
  return place->layer >= 0 && place->layer < stack->dims[0] && place->rows >= 0;
}
