// A c10d backend that moves nothing: every collective ends at once and leaves its outputs as they
// are, on any device, Meta included. With it one process is any rank of any size: the planner and
// tests of shapes run rank 37 of 128.
#pragma once

#include <c10/util/intrusive_ptr.h>

namespace c10d {
class Backend;
}  // namespace c10d

namespace longhaul::dtensor {

c10::intrusive_ptr<c10d::Backend> make_fake_backend(int rank, int size);

}  // namespace longhaul::dtensor
