#include "longhaul/data/normalizer.h"

#include <nlohmann/json.hpp>

#include "longhaul/base/error.h"
#include "longhaul/data/component.h"
#include "longhaul/data/growth_limit.h"

namespace longhaul::data {
namespace {

std::optional<NormalForm> normal_form_of(std::string_view type) {
  if (type == "NFC") return NormalForm::kNfc;
  if (type == "NFD") return NormalForm::kNfd;
  if (type == "NFKC") return NormalForm::kNfkc;
  if (type == "NFKD") return NormalForm::kNfkd;
  return std::nullopt;
}

}  // namespace

Normalizer::Normalizer(const nlohmann::json& description) {
  if (!description.is_null()) add(description, 0);
}

void Normalizer::add(const nlohmann::json& component, int depth) {
  check_steps(steps_.size(), "normalizer");
  const std::string type = type_of(component);
  if (type == "Sequence") {
    for (const auto& part : parts_of(component, "normalizers", depth)) add(part, depth + 1);
  } else if (const auto form = normal_form_of(type)) {
    steps_.emplace_back(*form);
  } else if (type == "Lowercase") {
    steps_.emplace_back(Lowercase{});
  } else if (type == "Strip") {
    steps_.emplace_back(Strip{flag(component, "strip_left"), flag(component, "strip_right")});
  } else if (type == "Prepend") {
    steps_.emplace_back(Prepend{required_text(component, "prepend")});
  } else if (type == "Replace") {
    steps_.emplace_back(Replace{pattern_of(component), required_text(component, "content")});
  } else {
    fail_user(
        "normalizer: the type '{}' is not supported (known: Sequence, NFC, NFD, NFKC, NFKD, "
        "Lowercase, Strip, Prepend, Replace)",
        type);
  }
}

TextNormalizer::TextNormalizer(const Normalizer& normalizer) : normalizer_(&normalizer) {
  for (const auto& step : normalizer.steps()) {
    matcher_of_step_.push_back(matchers_.size());
    if (const auto* replace = std::get_if<Normalizer::Replace>(&step)) {
      matchers_.emplace_back(replace->pattern);
    }
  }
}

TextNormalizer::Result TextNormalizer::apply(std::string_view text) {
  Result result{std::string(text), true};
  const size_t most = most_bytes_from(text.size());
  for (size_t i = 0; i < normalizer_->steps().size() && !result.text.empty(); ++i) {
    std::visit([&](const auto& step) { run(step, matcher_of_step_[i], most, result); },
               normalizer_->steps()[i]);
    if (result.text.size() > most) {
      fail_user("normalizer: it makes more than {} bytes of a text of {}", most, text.size());
    }
  }
  return result;
}

void TextNormalizer::run(NormalForm form, size_t, size_t, Result& result) {
  result.text = normal_form(form, result.text);
}

void TextNormalizer::run(const Normalizer::Lowercase&, size_t, size_t, Result& result) {
  result.text = lower_case(result.text);
}

void TextNormalizer::run(const Normalizer::Strip& strip, size_t, size_t, Result& result) {
  if (strip.right) result.text.resize(begin_of_trailing_space(result.text));
  const size_t left = strip.left ? end_of_leading_space(result.text) : 0;
  result.text.erase(0, left);
  result.keeps_start = result.keeps_start && left == 0;
}

void TextNormalizer::run(const Normalizer::Prepend& prepend, size_t, size_t, Result& result) {
  result.text.insert(0, prepend.text);
}

void TextNormalizer::run(const Normalizer::Replace& replace, size_t matcher, size_t most,
                         Result& result) {
  if (replace.content.empty() && result.keeps_start) {
    const auto first = matchers_[matcher].find(result.text, 0);
    result.keeps_start = !first || first->begin > 0 || first->end == 0;
  }
  result.text = replace_all(matchers_[matcher], result.text, replace.content, most);
}

std::string replace_all(RegexMatcher& pattern, std::string_view text, std::string_view content,
                        size_t most) {
  std::string out;
  pattern.each_part(text, [&](size_t begin, size_t end, bool is_match) {
    out += is_match ? content : text.substr(begin, end - begin);
    if (out.size() > most) {
      fail_user("Replace: it makes more than {} bytes of a text of {}", most, text.size());
    }
  });
  return out;
}

}  // namespace longhaul::data
