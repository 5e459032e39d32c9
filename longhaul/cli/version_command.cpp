// `longhaul version`: what a bug report needs.
#include <ATen/Context.h>
#include <ATen/Parallel.h>
#include <fmt/format.h>
#include <torch/version.h>

#include <CLI/CLI.hpp>

#include "longhaul/cli/commands.h"
#include "longhaul/ops/cpu/isa.h"
#include "longhaul/ops/matmul/matmul.h"
#include "longhaul/train/results/environment.h"

namespace longhaul::cli {
namespace {

std::string cuda_text() {
#ifdef LONGHAUL_HAS_CUDA
  if (!at::hasCUDA()) return "built in, no device available";
  return fmt::format("built in, {} device(s) available", at::getNumGPUs());
#else
  return "not built in";
#endif
}

void print_version() {
  const std::string git = train::git_text();
  fmt::print("longhaul   {}{}\n", LONGHAUL_VERSION,
             git.empty() ? "" : " (" + git + " when it was configured)");
  fmt::print("libtorch   {}\n", TORCH_VERSION);
  fmt::print("compiler   {}\n", train::compiler_text());
  fmt::print("CUDA       {}\n", cuda_text());
  fmt::print("threads    {}\n", at::get_num_threads());
  fmt::print("matmul     fp32 by {}\n", ops::fp32_product_kernels());
}

void print_kernels() {
  const auto& choice = cpu::chosen_isa();
  fmt::print("kernels    {}: {}\n", cpu::name_of(choice.isa), choice.reason);
  for (const auto isa : cpu::kAllIsas) {
    fmt::print("           {:<12} {}: needs {}\n", cpu::name_of(isa),
               cpu::is_supported(isa) ? "can run here" : "cannot run here", cpu::requirement(isa));
  }
}

}  // namespace

void add_version_command(CLI::App& app) {
  app.set_version_flag("--version", "longhaul " LONGHAUL_VERSION, "The program's version");
  auto* command = app.add_subcommand("version", "Versions of the program and what it is built on");
  command->footer("Example:\n  longhaul version --kernels");
  const auto kernels = std::make_shared<bool>(false);
  command->add_flag("--kernels", *kernels,
                    "Which instruction set the fused CPU kernels use, and why (LONGHAUL_ISA names "
                    "another)");
  command->callback([kernels] { *kernels ? print_kernels() : print_version(); });
}

}  // namespace longhaul::cli
