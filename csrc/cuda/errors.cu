#include "errors.h"

#include <cuda_runtime.h>

namespace gsd {

void drop_error() { (void)cudaGetLastError(); }

}  // namespace gsd
