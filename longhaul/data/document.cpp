#include "longhaul/data/document.h"

#include <fcntl.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

#include "longhaul/base/error.h"
#include "longhaul/base/log.h"
#include "longhaul/base/text.h"

namespace longhaul::data {
namespace {

constexpr int64_t kMostTold = 10;

bool is_power_of_ten(int64_t number) {
  while (number % 10 == 0) number /= 10;
  return number == 1;
}

}  // namespace

bool Split::takes(uint64_t text_hash) const {
  const bool in_validation = static_cast<double>(text_hash >> 11) * 0x1.0p-53 < fraction;
  return in_validation == held_out;
}

std::string take_text(std::string_view text, InvalidText on_invalid, Document& document) {
  std::string invalid = what_is_invalid(text);
  if (!invalid.empty() && on_invalid == InvalidText::kStop) return invalid;
  document = {invalid.empty() ? std::string(text) : replace_invalid(text), !invalid.empty()};
  return "";
}

void BadDocuments::list_in(std::filesystem::path file) {
  const std::lock_guard lock(mutex_);
  list_path_ = std::move(file);
  if (held_) append_held();
}

void BadDocuments::hold_list() {
  const std::lock_guard lock(mutex_);
  held_.emplace();
}

void BadDocuments::end_list() {
  const std::lock_guard lock(mutex_);
  list_path_.reset();
  list_.reset();
}

// One write(2) a line, so that several may append to one file.
void BadDocuments::append(const std::string& line) {
  if (!list_.valid()) {
    list_ = FileDescriptor(
        ::open(list_path_->c_str(), O_WRONLY | O_APPEND | O_CREAT | O_CLOEXEC, 0666));
  }
  if (list_.valid() &&
      ::write(list_.get(), line.data(), line.size()) == static_cast<ssize_t>(line.size())) {
    return;
  }
  log::warn("cannot write '{}': {}; further bad documents are not listed there",
            list_path_->string(), std::strerror(errno));
  list_path_.reset();
}

void BadDocuments::append_held() {
  const std::string there =
      "\n" + (std::filesystem::exists(*list_path_) ? read_file(*list_path_) : "");
  for (const auto& line : *held_) {
    if (list_path_ && there.find("\n" + line) == std::string::npos) append(line);
  }
  held_.reset();
}

void BadDocuments::add(const Place& place, const std::string& reason, const Place& cheap_place) {
  if (all_) {
    all_->add(place, reason, cheap_place);
    const std::lock_guard lock(mutex_);
    ++count_;
    return;
  }
  if (!skip_) {
    fail_user(
        "{}: {}; correct it, or have such documents left out: training.bad_documents = \"skip\", "
        "or --bad-documents skip of `longhaul data` and `longhaul tokenizer train`",
        place(), reason);
  }
  int64_t number = 0;
  {
    const std::lock_guard lock(mutex_);
    number = ++count_;
    if (number == 1) first_ = fmt::format("{}: {}", place(), reason);
  }
  if (number == most_) {
    fail_user("the first {} documents are all bad ({})", with_commas(number), first());
  }
  if (number <= kMostTold) {
    log::warn("{}: {}: left out{}", place(), reason,
              number == kMostTold ? "; further ones are only counted" : "");
  } else if (is_power_of_ten(number)) {
    log::warn("{} bad documents are left out so far", with_commas(number));
  }
  const std::lock_guard lock(mutex_);
  if (!list_path_ && !held_) return;
  const std::string line = fmt::format("{}: {}\n", cheap_place ? cheap_place() : place(), reason);
  if (held_) {
    held_->push_back(line);
  } else {
    append(line);
  }
}

void BadDocuments::go_back_to(int64_t count) {
  const std::lock_guard lock(mutex_);
  count_ = count;
}

std::string BadDocuments::first() const {
  const std::lock_guard lock(mutex_);
  return first_;
}

int64_t BadDocuments::count() const {
  const std::lock_guard lock(mutex_);
  return count_;
}

}  // namespace longhaul::data
