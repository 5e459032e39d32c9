// The commands of the program, one file each. A function adds its command, options, help with an
// example and a callback that does the work; failures are thrown and only main() prints them.
#pragma once

namespace CLI {
class App;
}

namespace longhaul::cli {

void add_checkpoint_command(CLI::App& app);
void add_comm_command(CLI::App& app);
void add_compare_command(CLI::App& app);
void add_config_command(CLI::App& app);
void add_convert_command(CLI::App& app);
void add_data_command(CLI::App& app);
void add_eval_command(CLI::App& app);
void add_generate_command(CLI::App& app);
void add_report_command(CLI::App& app);
void add_tokenizer_command(CLI::App& app);
void add_train_command(CLI::App& app);
void add_version_command(CLI::App& app);

}  // namespace longhaul::cli
