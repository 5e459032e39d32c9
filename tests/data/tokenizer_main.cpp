// The tokenizer command as a program of its own, for the tests of the command.
#include <CLI/CLI.hpp>
#include <iostream>

#include "longhaul/base/error.h"
#include "longhaul/base/log.h"

namespace longhaul::cli {
void add_tokenizer_command(CLI::App& app);
}

int main(int argc, char** argv) {
  longhaul::log::configure(false);
  CLI::App app("tokenizer command");
  longhaul::cli::add_tokenizer_command(app);
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& error) {
    return app.exit(error) == 0 ? 0 : 2;
  } catch (const longhaul::UserError& error) {
    std::cerr << "error: " << error.what() << '\n';
    return 2;
  }
  return 0;
}
