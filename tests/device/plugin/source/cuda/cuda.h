// What the parts of the runtime for CUDA know of each other. Compiled by nvcc as well.
#pragma once
#include <cuda_runtime.h>

namespace rehearsal {

class Stream {
 public:
  cudaStream_t handle;
  int device, number;  // number: among the streams of its device, in the order of their creation
};

class Event {
 public:
  cudaEvent_t handle;
};

// Whether a call has gone well. If not, the thread forgets the error: CUDA's last error would be met by a later call.
bool went_well(cudaError_t status);
// Raises an error in the Python code that asked, unless the call has gone well.
void check(cudaError_t status, const char* call);
#define CUDA_CALL(call) ::rehearsal::check(call, #call)
void use(int device);  // makes its card the current one of this thread
int current_device();  // of this thread, as it was used last

}  // namespace rehearsal
