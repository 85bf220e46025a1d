// The error that the runtime keeps of a call.
#pragma once

namespace gsd {

// It is kept until somebody asks, and whoever asks after the next launch takes it for that one's. So whoever reports an
// error, or goes on without what failed, drops it.
void drop_error();

}  // namespace gsd
