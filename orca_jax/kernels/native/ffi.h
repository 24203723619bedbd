// Calls from XLA (its "foreign function interface").

#include <stddef.h>
#include <stdint.h>

#include "xla/ffi/api/c_api.h"

#if XLA_FFI_API_MINOR < 4  // of jaxlib before 0.11.1
typedef XLA_FFI_Extension_Base XLA_FFI_InternalExtension;
#endif

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

// Matrices of a stack from `first` on, and the rows of x that each multiplies: as many as `sizes` says, one matrix after
// the other, and none after `rows`. Nothing is written for other rows.
typedef struct {
  int64_t first, count, rows;
  const int32_t *sizes;
} Place;

// The rows of x of one of these matrices, by its index from `first` on.
typedef struct {
  int64_t index, row, rows;
} Slice;

// True for the next matrix with rows. The first one follows on {-1}.
static inline int next_slice(Slice *slice, const Place *place) {
  slice->row += slice->rows;
  while (++slice->index < place->count) {
    const int64_t left = place->rows - slice->row, size = place->sizes[slice->index];
    slice->rows = size < left ? size : left;
    if (slice->rows > 0) return 1;
  }
  return 0;
}

// The number of matrices with rows.
static inline int64_t count_slices(const Place *place) {
  int64_t count = 0;
  for (Slice slice = {-1}; next_slice(&slice, place);) count++;
  return count;
}

// True if the argument is a place in this stack: `first`, and sizes that are not negative. x has so many rows.
static inline int read_place(Place *place, const XLA_FFI_Buffer *given, const XLA_FFI_Buffer *stack, int64_t rows) {
  if (given->dtype != XLA_FFI_DataType_S32 || given->rank != 1 || given->dims[0] < 2 || stack->rank < 1) return 0;
  const int32_t *numbers = given->data;
  *place = (Place){numbers[0], given->dims[0] - 1, 0, numbers + 1};
  for (int64_t i = 0; i < place->count; i++) {
    if (place->sizes[i] < 0) return 0;
    place->rows += place->sizes[i];
  }
  if (place->rows > rows) place->rows = rows;
  return place->first >= 0 && place->first + place->count <= stack->dims[0];
}
