// The option table: the model and what its converters read.
#include "longhaul/config/option_builder.h"

namespace longhaul {
namespace {

void add_model(std::vector<Option>& table) {
  OptionSection model(
      table, "model", [](auto& c) -> auto& { return c.model; });
  using S = Model;
  model.key("name", &S::name, "The architecture; deepseek_v3 and deepseek_v32 can be trained.");
  model.key("flavor", &S::flavor, "A built-in shape of that architecture.");
  model.key("hf_assets_path", &S::hf_assets_path,
            "Folder with tokenizer files, config.json and perhaps weights.");
  model.key("tokenizer_path", &S::tokenizer_path, "Old name of hf_assets_path, which it replaces.");
  model.key("converters", &S::converters,
            "Module replacements, applied in this order: dsa, rms_norm, rope, permute, gmm, "
            "cross_entropy (also with the prefix npu_), quantize.linear.float8, ...");
  model.key("print_after_conversion", &S::print_after_conversion,
            "Print the modules after the converters.");
  model.own("init_std", &S::init_std,
            "Standard deviation of initial weights; default: the shape's initializer_range.",
            above(0));
  model.own("init_depth_scale", &S::init_depth_scale,
            "Divide o_proj's and down_proj's initial weights by sqrt(2 layers).");
  model.own("mla_form", &S::mla_form, "How latent attention is computed; same numbers.",
            one_of({"absorbed", "expanded"}));
}

void add_dsa(std::vector<Option>& table) {
  OptionSection dsa(
      table, "dsa", [](auto& c) -> auto& { return c.dsa; });
  using S = Dsa;
  dsa.own("stage", &S::stage,
          "sparse: attend to the indexer's choice; dense_warmup: dense attention, only the indexer "
          "learns; off: dense attention, no indexer.",
          one_of({"sparse", "dense_warmup", "off"}));
  dsa.own("indexer_loss_coeff", &S::indexer_loss_coeff, "Weight of the indexer's KL loss.",
          at_least(0));
  dsa.own("train_indexer", &S::train_indexer, "false freezes the indexer.");
  dsa.own("hadamard", &S::hadamard, "Rotate indexer queries and keys by a Hadamard matrix.");
  dsa.own("indexer_rope", &S::indexer_rope,
          "Pairing of the indexer's rotary dimensions; DeepSeek-V3.2 has half_split.",
          one_of({"half_split", "interleaved"}));
}

void add_moe(std::vector<Option>& table) {
  OptionSection moe(
      table, "moe", [](auto& c) -> auto& { return c.moe; });
  using S = Moe;
  moe.own("bias_update_speed", &S::bias_update_speed,
          "Step of the router's balancing bias; 0 leaves it fixed.", at_least(0));
  moe.own("bias_update_zero_mean", &S::bias_update_zero_mean, "Keep the mean of the bias at 0.");
  moe.own("sequence_balance_loss_coeff", &S::sequence_balance_loss_coeff,
          "Weight of the sequence-wise balance loss.", at_least(0));
  moe.own("z_loss_coeff", &S::z_loss_coeff, "Weight of the router's z-loss.", at_least(0));
}

void add_mtp(std::vector<Option>& table) {
  OptionSection mtp(
      table, "mtp", [](auto& c) -> auto& { return c.mtp; });
  using S = Mtp;
  mtp.own("num_modules", &S::num_modules,
          "Multi-token prediction depth; default: the shape's num_nextn_predict_layers.",
          at_least(0), "training.num_mtp_modules");
  mtp.own("loss_weight", &S::loss_weight, "Weight of the depths' mean loss.", at_least(0));
  mtp.own("hidden", &S::hidden, "The hidden state that the first depth takes.",
          one_of({"before_norm", "after_norm"}));
  mtp.own("own_norm", &S::own_norm, "A final norm of its own instead of the main model's.");
}

void add_linear_float8(std::vector<Option>& table) {
  OptionSection section(
      table, "quantize.linear.float8", [](auto& c) -> auto& { return c.quantize.linear.float8; });
  using S = QuantizeLinearFloat8;
  section.key("enable_fsdp_float8_all_gather", &S::enable_fsdp_float8_all_gather,
              "Gather FSDP's weights in float8.");
  section.key("precompute_float8_dynamic_scale_for_fsdp",
              &S::precompute_float8_dynamic_scale_for_fsdp,
              "Compute the scales of all weights at once after the optimizer step.");
  section.key("recipe_name", &S::recipe_name, "Granularity of the scales.",
              one_of({"tensorwise", "rowwise", "rowwise_with_gw_hp"}));
  section.key("filter_fqns", &S::filter_fqns, "Modules to leave out, by part of the name.");
  section.key("emulate", &S::emulate, "Compute in higher precision with float8's rounding.");
}

void add_linear_mx(std::vector<Option>& table) {
  OptionSection section(
      table, "quantize.linear.mx", [](auto& c) -> auto& { return c.quantize.linear.mx; });
  using S = QuantizeLinearMx;
  section.key("mxfp8_dim1_cast_kernel_choice", &S::mxfp8_dim1_cast_kernel_choice,
              "Kernel that casts along the first dimension.", one_of({"triton", "cuda", "torch"}));
  section.key("recipe_name", &S::recipe_name, "Name of the MX recipe.");
  section.key("filter_fqns", &S::filter_fqns, "Modules to leave out, by part of the name.");
}

void add_grouped_mm(std::vector<Option>& table) {
  OptionSection float8(
      table, "quantize.grouped_mm.float8",
      [](auto& c) -> auto& { return c.quantize.grouped_mm.float8; });
  float8.key("fqns", &QuantizeGroupedMmFloat8::fqns, "Expert layers to quantize, by name.");
  OptionSection mx(
      table, "quantize.grouped_mm.mx", [](auto& c) -> auto& { return c.quantize.grouped_mm.mx; });
  mx.key("recipe_name", &QuantizeGroupedMmMx::recipe_name, "Name of the MX recipe.",
         one_of({"mxfp8"}));
  mx.key("fqns", &QuantizeGroupedMmMx::fqns, "Expert layers to quantize, by name.");
}

}  // namespace

void add_model_options(std::vector<Option>& table) {
  add_model(table);
  add_dsa(table);
  add_moe(table);
  add_mtp(table);
  add_linear_float8(table);
  add_linear_mx(table);
  add_grouped_mm(table);
}

}  // namespace longhaul
