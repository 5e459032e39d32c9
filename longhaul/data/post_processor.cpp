#include "longhaul/data/post_processor.h"

#include <nlohmann/json.hpp>

#include "longhaul/base/error.h"
#include "longhaul/data/component.h"

namespace longhaul::data {
namespace {

std::optional<std::string> special_token(const nlohmann::json& piece) {
  const auto& token = field(piece, "SpecialToken");
  if (token.is_null()) return std::nullopt;
  return text_of(token, "id");
}

void read_template(const nlohmann::json& component, SpecialTokensAround& around) {
  const auto& single = field(component, "single");
  if (!single.is_array()) fail_user("TemplateProcessing: 'single' must be an array");
  bool before_text = true;
  for (const auto& piece : single) {
    if (const auto token = special_token(piece)) {
      if (!before_text) around.after = token;
      if (before_text && !around.before) around.before = token;
    } else {
      before_text = false;
    }
  }
}

void read(const nlohmann::json& component, int depth, SpecialTokensAround& around) {
  const std::string type = type_of(component);
  if (type == "Sequence") {
    for (const auto& part : parts_of(component, "processors", depth)) read(part, depth + 1, around);
  } else if (type == "TemplateProcessing") {
    read_template(component, around);
  } else if (type != "ByteLevel") {
    fail_user(
        "post_processor: the type '{}' is not supported (known: Sequence, TemplateProcessing, "
        "ByteLevel)",
        type);
  }
}

}  // namespace

SpecialTokensAround read_post_processor(const nlohmann::json& description) {
  SpecialTokensAround around;
  if (!description.is_null()) read(description, 0, around);
  return around;
}

}  // namespace longhaul::data
