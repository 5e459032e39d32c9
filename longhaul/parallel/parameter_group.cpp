#include "longhaul/parallel/parameter_group.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>

#include <set>

#include "longhaul/base/error.h"
#include "longhaul/dtensor/dtensor.h"
#include "longhaul/dtensor/placement.h"
#include "longhaul/parallel/collectives.h"

namespace longhaul::parallel {
namespace {

// Pieces of different dtypes stand behind each other in bytes.
constexpr int64_t kAlignment = 16;

// Tensor parallelism may have made a DTensor of a parameter before. Then what is cut here is the
// part of it that this rank holds; these five functions are all that knows it.
Tensor local_part(const Tensor& parameter) {
  return dtensor::is_dtensor(parameter) ? dtensor::local_of(parameter) : parameter;
}

// A leaf like `parameter` whose local part is `local`, with the same memory.
Tensor with_local_part(const Tensor& parameter, const Tensor& local) {
  // With a version counter of its own: filling the memory again is no change that autograd sees.
  Tensor leaf = local.variable_data();
  if (dtensor::is_dtensor(parameter)) {
    leaf = dtensor::wrap(leaf, dtensor::spec_of(parameter), parameter.sizes(), parameter.strides());
  }
  return leaf.set_requires_grad(parameter.requires_grad());
}

// What this rank adds to the gradient of a leaf's local part. Where the leaf is whole, terms stay
// what they are, and of a gradient that every rank has the first one's counts.
Tensor local_gradient(const Tensor& leaf, const std::string& name) {
  const Tensor& grad = leaf.grad();
  if (!dtensor::is_dtensor(grad)) return grad;
  auto placements = dtensor::spec_of(leaf).placements;
  for (size_t axis = 0; axis < placements.size(); ++axis) {
    const auto& arrived = dtensor::spec_of(grad).placements[axis];
    if (placements[axis].is_replicate() && arrived.is_partial()) placements[axis] = arrived;
  }
  return own_term(dtensor::redistribute(grad, placements), "the gradient of " + name);
}

// A whole DTensor's gradients are summed with those of the group, which must then have all of them.
void check_whole_in(const nn::NamedParameter& parameter, const dtensor::Communicator& group) {
  if (!dtensor::is_dtensor(*parameter.tensor)) return;
  const auto& spec = dtensor::spec_of(*parameter.tensor);
  const std::set<int> ranks(group.global_ranks().begin(), group.global_ranks().end());
  for (size_t axis = 0; axis < spec.placements.size(); ++axis) {
    if (!spec.placements[axis].is_replicate()) continue;
    for (const int rank : spec.mesh->axis(static_cast<int>(axis)).global_ranks()) {
      LONGHAUL_CHECK(
          ranks.count(rank) > 0,
          "{} is whole on rank {} of axis {}, which is not one of those of {} that it is "
          "cut over; cut it over a group that has both",
          parameter.name, rank, spec.mesh->axis(static_cast<int>(axis)).axis(), group.axis());
    }
  }
}

nn::Part part_of_parameter(const Tensor& parameter) {
  nn::Part part{parameter.sizes().vec(), std::vector<int64_t>(parameter.sizes().size(), 0)};
  if (dtensor::is_dtensor(parameter)) {
    const auto& spec = dtensor::spec_of(parameter);
    part.offsets = spec.mesh->local_box(parameter.sizes(), spec.placements).offsets;
  }
  return part;
}

// The last dim of bytes read as another dtype.
Tensor as_dtype(const Tensor& bytes, int64_t offset, int64_t elements, at::ScalarType dtype) {
  return bytes.narrow(-1, offset, elements * static_cast<int64_t>(c10::elementSize(dtype)))
      .view(dtype);
}

// Copies between the elements of a tensor in their order and the pieces that they are cut into,
// which are the rows of `pieces` [ranks, piece]: all full, then one short, then empty ones.
template <typename Copy>
void for_pieces(const Tensor& pieces, const Tensor& elements, const Copy& copy) {
  const int64_t piece = pieces.size(1);
  if (elements.numel() == 0) return;
  const int64_t full = elements.numel() / piece, rest = elements.numel() % piece;
  copy(pieces.narrow(0, 0, full), elements.narrow(0, 0, full * piece).view({full, piece}));
  if (rest > 0) {
    copy(pieces.select(0, full).narrow(0, 0, rest), elements.narrow(0, full * piece, rest));
  }
}

void join_pieces(const Tensor& pieces, Tensor& whole) {
  for_pieces(pieces, whole.view(-1), [](const Tensor& from, const Tensor& to) { to.copy_(from); });
}

void split_pieces(const Tensor& whole, const Tensor& pieces) {
  for_pieces(pieces, whole.contiguous().view(-1),
             [](const Tensor& to, const Tensor& from) { to.copy_(from); });
}

// Rows of a parameter as a tensor of their own; of one without memory, zeros on `device`.
Tensor take_rows(const Tensor& local, const dtensor::Slice& rows, at::Device device) {
  if (!local.is_meta()) {
    const Tensor taken = local.detach().narrow(0, rows.start, rows.length);
    return rows.length == local.size(0) ? taken : taken.clone(at::MemoryFormat::Contiguous);
  }
  auto sizes = local.sizes().vec();
  sizes[0] = rows.length;
  return at::zeros(sizes, at::TensorOptions(local.scalar_type()).device(device));
}

void allocate_memory(Tensor& tensor) {
  auto* storage = tensor.storage().unsafeGetStorageImpl();
  const size_t bytes = static_cast<size_t>(tensor.numel()) * tensor.element_size();
  storage->set_data_ptr_noswap(storage->allocator()->allocate(bytes));
  storage->set_nbytes(bytes);
}

void free_memory(Tensor& tensor) {
  auto* storage = tensor.storage().unsafeGetStorageImpl();
  storage->set_data_ptr_noswap(c10::DataPtr(nullptr, tensor.device()));
  storage->set_nbytes(0);
}

}  // namespace

ParameterGroup::ParameterGroup(const std::vector<nn::NamedParameter>& parameters,
                               ParameterGroupOptions options)
    : options_(std::move(options)) {
  const at::NoGradGuard no_grad;
  for (const auto& parameter : parameters) {
    LONGHAUL_CHECK(parameter.tensor->dim() > 0, "{}: a parameter without dims cannot be cut",
                   parameter.name);
    check_whole_in(parameter, *options_.shard);
    if (parameter.tensor->scalar_type() == at::kDouble) reduce_dtype_ = at::kDouble;
    names_.push_back(parameter.name);
    cut(entries_.emplace_back(), parameter);
  }
}

void ParameterGroup::cut(Entry& entry, const nn::NamedParameter& parameter) {
  const auto& group = *options_.shard;
  const Tensor old = *parameter.tensor, local = local_part(old);
  entry.slot = parameter.tensor;
  entry.part = part_of_parameter(old);
  entry.sizes = local.sizes().vec();
  const int64_t rows = local.size(0), row = rows == 0 ? 0 : local.numel() / rows;
  const auto own = dtensor::slice_of(rows, group.size(), group.rank());
  entry.part.offsets[0] += own.start;
  entry.piece = ceil_div(rows, static_cast<int64_t>(group.size())) * row;
  entry.own = own.length * row;
  padded_ = padded_ || entry.piece * group.size() != local.numel();

  const Tensor rows_here = take_rows(local, own, options_.device);
  swaps_ = swaps_ || is_cut() || dtensor::is_dtensor(old);
  if (is_cut()) {
    add_whole(entry, old, parameter.exact ? local.scalar_type() : compute_dtype_of(local));
  } else {
    entry.whole =
        local.is_meta() || dtensor::is_dtensor(old) ? with_local_part(old, rows_here) : old;
  }
  const bool same = !is_cut() && !dtensor::is_dtensor(old);
  entry.shard =
      same ? entry.whole : rows_here.variable_data().set_requires_grad(old.requires_grad());
  *entry.slot = entry.shard;
  if (entry.trains()) {
    entry.reduce_offset = reduce_elements_;
    reduce_elements_ += entry.piece;
  }
}

at::ScalarType ParameterGroup::compute_dtype_of(const Tensor& local) const {
  return local.scalar_type() == at::kDouble ? at::kDouble : options_.compute_dtype;
}

// The leaf that the slot holds in use, and the place of its piece in the gather.
void ParameterGroup::add_whole(Entry& entry, const Tensor& parameter, at::ScalarType dtype) {
  entry.memory = at::empty(entry.sizes, at::TensorOptions(dtype).device(options_.device));
  entry.whole = with_local_part(parameter, entry.memory);
  free_memory(entry.memory);
  entry.gather_offset = gather_bytes_;
  const int64_t bytes = entry.piece * static_cast<int64_t>(c10::elementSize(dtype));
  gather_bytes_ += ceil_div(bytes, kAlignment) * kAlignment;
}

void ParameterGroup::start_gather() {
  if (is_gathered() || !is_cut()) return;
  const at::NoGradGuard no_grad;
  const auto bytes = at::TensorOptions(at::kByte).device(options_.device);
  const Tensor pieces = at::empty({gather_bytes_}, bytes);
  for (const auto& entry : entries_) {
    as_dtype(pieces, entry.gather_offset, entry.own, entry.memory.scalar_type())
        .copy_(entry.shard.view(-1));
  }
  gathered_ = at::empty({options_.shard->size(), gather_bytes_}, bytes);
  gather_ = options_.shard->all_gather(gathered_, pieces);
}

void ParameterGroup::unshard() {
  if (is_unsharded()) return;
  start_gather();
  const at::NoGradGuard no_grad;
  gather_.wait();
  for (auto& entry : entries_) {
    *entry.slot = entry.whole;
    if (!is_cut()) continue;
    allocate_memory(entry.memory);
    const auto dtype = entry.memory.scalar_type();
    join_pieces(as_dtype(gathered_, entry.gather_offset, entry.piece, dtype), entry.memory);
  }
  gathered_.reset();
  unsharded_ = true;
}

void ParameterGroup::reshard() {
  if (gathered_.defined()) {  // and was not used
    gather_.wait();
    gathered_.reset();
  }
  if (!unsharded_) return;
  for (auto& entry : entries_) {
    *entry.slot = entry.shard;
    if (is_cut()) free_memory(entry.memory);
  }
  unsharded_ = false;
}

bool ParameterGroup::has_gradients() const {
  for (const auto& entry : entries_) {
    if (entry.kept.defined() || entry.whole.grad().defined()) return true;
  }
  return false;
}

void ParameterGroup::keep_gradients() {
  if (!swaps_) return;
  const at::NoGradGuard no_grad;
  for (size_t i = 0; i < entries_.size(); ++i) {
    Entry& entry = entries_[i];
    // Autograd goes on adding to what has the right dtype already.
    if (!entry.whole.grad().defined() || entry.whole.scalar_type() == reduce_dtype_) continue;
    entry.kept = take_gradient(i);
  }
}

// With what was kept before, in the reduction's dtype where they are two.
Tensor ParameterGroup::take_gradient(size_t index) {
  Entry& entry = entries_[index];
  Tensor sum = std::exchange(entry.kept, Tensor());
  if (entry.whole.grad().defined()) {
    const Tensor grad = local_gradient(entry.whole, names_[index]);
    sum = sum.defined() ? sum.add_(grad) : grad.to(reduce_dtype_);
    entry.whole.mutable_grad().reset();
  }
  return sum;
}

void ParameterGroup::fill_reduction(Tensor& pieces) {
  for (size_t i = 0; i < entries_.size(); ++i) {
    Entry& entry = entries_[i];
    if (!entry.trains()) continue;
    const Tensor grad = take_gradient(i);
    reduction_.has[i] = grad.defined();
    if (entry.piece == 0) continue;
    Tensor own_pieces = pieces.narrow(1, entry.reduce_offset, entry.piece);
    grad.defined() ? split_pieces(grad, own_pieces) : (void)own_pieces.zero_();
  }
}

void ParameterGroup::start_reduction() {
  LONGHAUL_CHECK(reduction_.stage == Reduction::Stage::kIdle,
                 "{}: gradients are being reduced already", names_.front());
  if (!swaps_ && options_.replicate->size() == 1) return;  // they are where they belong
  const at::NoGradGuard no_grad;
  const auto dtype = at::TensorOptions(reduce_dtype_).device(options_.device);
  const std::vector<int64_t> sizes = {options_.shard->size(), reduce_elements_};
  Tensor pieces = padded_ ? at::zeros(sizes, dtype) : at::empty(sizes, dtype);
  reduction_.has.assign(entries_.size(), false);
  fill_reduction(pieces);
  if (is_cut()) {
    reduction_.sums = at::empty({reduce_elements_}, dtype);
    reduction_.pending =
        options_.shard->reduce_scatter(reduction_.sums, pieces, dtensor::Reduction::kSum);
  } else {
    reduction_.sums = pieces.view(-1);
  }
  reduction_.stage = Reduction::Stage::kScatter;
}

bool ParameterGroup::advance_reduction() {
  if (reduction_.stage == Reduction::Stage::kIdle) return false;
  reduction_.pending.wait();
  if (reduction_.stage == Reduction::Stage::kScatter && options_.replicate->size() > 1) {
    reduction_.pending = options_.replicate->all_reduce(reduction_.sums, dtensor::Reduction::kSum);
    reduction_.stage = Reduction::Stage::kReplicate;
    return true;
  }
  deliver();
  return false;
}

void ParameterGroup::deliver() {
  const at::NoGradGuard no_grad;
  for (size_t i = 0; i < entries_.size(); ++i) {
    if (!reduction_.has[i]) continue;
    Entry& entry = entries_[i];
    const Tensor grad = reduction_.sums.narrow(0, entry.reduce_offset, entry.own)
                            .view(entry.shard.sizes())
                            .to(entry.shard.scalar_type());
    Tensor& slot = entry.shard.mutable_grad();
    slot = slot.defined() ? slot + grad : grad;
  }
  reduction_ = {};
}

nn::Part ParameterGroup::part_of(size_t index) const { return entries_[index].part; }

Tensor ParameterGroup::whole_of(size_t index, const Tensor& part) const {
  const at::NoGradGuard no_grad;
  const Entry& entry = entries_[index];
  Tensor whole = part.detach();
  if (is_cut()) {
    const auto options = whole.options();
    Tensor piece = at::zeros({entry.piece}, options);
    piece.narrow(0, 0, entry.own).copy_(part.reshape(-1));
    Tensor pieces = at::empty({options_.shard->size(), entry.piece}, options);
    options_.shard->all_gather(pieces, piece).wait();
    whole = at::empty(entry.sizes, options);
    join_pieces(pieces, whole);
  }
  if (!dtensor::is_dtensor(entry.whole)) return whole;
  return dtensor::full_tensor(dtensor::wrap(whole, dtensor::spec_of(entry.whole),
                                            entry.whole.sizes(), entry.whole.strides()));
}

std::vector<Group> ParameterGroup::cut_by(size_t index) const {
  std::vector<Group> groups;
  if (is_cut()) groups.push_back(options_.shard);
  const Tensor& whole = entries_[index].whole;
  if (!dtensor::is_dtensor(whole)) return groups;
  const auto& spec = dtensor::spec_of(whole);
  for (int axis = 0; axis < spec.mesh->num_axes(); ++axis) {
    const auto& name = spec.mesh->axis(axis).axis();
    if (spec.placements[static_cast<size_t>(axis)].is_shard() && spec.mesh->axis(axis).size() > 1) {
      groups.push_back(spec.mesh->shared_axis(name));
    }
  }
  return groups;
}

}  // namespace longhaul::parallel
