#include "longhaul/base/json.h"

#include <algorithm>
#include <set>
#include <vector>

#include "longhaul/base/error.h"

namespace longhaul {
namespace {

// Remembers the keys of the objects that are open, by depth.
class KeyWatch {
 public:
  // The first key that stood twice in one object, or empty.
  const std::string& repeated() const { return repeated_; }

  void see(size_t depth, nlohmann::json::parse_event_t event, const nlohmann::json& value) {
    using Event = nlohmann::json::parse_event_t;
    if (event == Event::object_start) {
      if (keys_.size() <= depth + 1) keys_.resize(depth + 2);
      keys_[depth + 1].clear();
    } else if (event == Event::key) {
      const auto& key = value.get_ref<const std::string&>();
      if (!keys_[depth].insert(key).second && repeated_.empty()) repeated_ = key;
    }
  }

 private:
  std::vector<std::set<std::string>> keys_;
  std::string repeated_;
};

}  // namespace

nlohmann::json parse_json(std::string_view text, const std::string& where) {
  KeyWatch watch;
  const auto callback = [&](int depth, nlohmann::json::parse_event_t event, nlohmann::json& value) {
    watch.see(static_cast<size_t>(depth), event, value);
    return true;
  };
  nlohmann::json parsed;
  try {
    parsed = nlohmann::json::parse(text.begin(), text.end(), callback);
  } catch (const nlohmann::json::parse_error& error) {
    const size_t place = std::min<size_t>(error.byte, text.size());
    const auto line = 1 + std::count(text.begin(), text.begin() + static_cast<long>(place), '\n');
    fail_user("{}:{}: not valid JSON at byte {}; write or fetch the file again", where, line,
              error.byte);
  } catch (const nlohmann::json::out_of_range& error) {
    fail_user("{}: a number is out of range ({})", where, error.what());
  }
  if (!watch.repeated().empty()) {
    fail_user("{}: the key '{}' stands twice in one object; keep one of them", where,
              watch.repeated());
  }
  return parsed;
}

}  // namespace longhaul
