// Training on corpora that are read as streams: the same rows whatever the number of ranks, an end
// where the data end, held-out documents, mixtures.
#include "longhaul/base/hash.h"
#include "tests/cli/small_job.h"

namespace longhaul {
namespace {

using test::spill;
using test::Words;
using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;

class StreamedTraining : public test::SmallJob {
 protected:
  StreamedTraining() {
    std::string rows;
    for (unsigned i = 0; i < 40; ++i) {
      rows += nlohmann::json{{"text", test::small_text(i + 100)}}.dump() + "\n";
    }
    spill(path("rows.jsonl"), rows);
  }

  // Four rows in a step, on any number of ranks.
  test::ProgramResult train_stream(Words more, const std::string& run_folder, int ranks = 1) const {
    more.insert(more.begin(),
                {"--ranks", std::to_string(ranks), "--job.dump_folder", run_folder,
                 "--training.stream_above_mb", "0", "--training.local_batch_size",
                 std::to_string(4 / ranks), "--training.dataset_path", "rows.jsonl",
                 "--checkpoint.no_last_save_model_only", "--comm.train_timeout_seconds", "20"});
    return train(more);
  }
  static Words without_validation(Words more = {}) {
    more.push_back("--validation.no_enable");
    return more;
  }
  void expect_same_losses(const std::string& one, const std::string& other) const {
    const auto first = metrics(one), second = metrics(other);
    ASSERT_EQ(first.size(), second.size());
    for (size_t i = 0; i < first.size(); ++i) {
      EXPECT_EQ(first[i]["tokens"], second[i]["tokens"]) << i;
      EXPECT_NEAR(first[i]["loss"].get<double>(), second[i]["loss"].get<double>(), 2e-4) << i;
    }
  }
};

TEST_F(StreamedTraining, GoesOnExactlyOnAnotherNumberOfRanks) {
  const auto whole = train_stream(without_validation(), "whole");
  expect_trained(whole);
  EXPECT_THAT(whole.err, HasSubstr("read as a stream"));
  // The schedule counts on six steps, so it is stopped by what it saves.
  for (const auto& [ranks, steps] : {std::pair(2, 2), std::pair(4, 4), std::pair(1, 6)}) {
    const auto part = train_stream(without_validation({"--training.steps", std::to_string(steps),
                                                       "--lr_scheduler.decay_ratio", "0"}),
                                   "parts", ranks);
    EXPECT_EQ(part.status, 0) << part.err;
  }
  const auto steady =
      train_stream(without_validation({"--lr_scheduler.decay_ratio", "0"}), "steady");
  expect_trained(steady);
  expect_same_losses("steady", "parts");
  // Without the counts of rows the position is found by reading.
  fs::remove(path("steady/row_counts.txt"));
  for (const char* folder : {"steady", "parts"}) {
    const auto on = train_stream(
        without_validation({"--training.steps", "7", "--lr_scheduler.decay_ratio", "0"}), folder);
    EXPECT_EQ(on.status, 0) << on.err;
    EXPECT_EQ(metrics(folder).size(), 7u);
  }
  expect_same_losses("steady", "parts");
}

TEST_F(StreamedTraining, EndsOnAllRanksWhereTheDataEnd) {
  for (const int ranks : {1, 2}) {
    const auto folder = "run" + std::to_string(ranks);
    const auto result = train_stream(without_validation({"--training.no_repeat", "--training.steps",
                                                         "1000", "--checkpoint.interval", "1000"}),
                                     folder, ranks);
    ASSERT_EQ(result.status, 0) << result.err;
    EXPECT_THAT(result.err, AllOf(HasSubstr("the data ends: rank "),
                                  HasSubstr(" rows are left out"), Not(HasSubstr("of 0 rows"))));
  }
  EXPECT_EQ(metrics("run1").size(), metrics("run2").size());
}

TEST_F(StreamedTraining, HoldsOutASplitAndMixes) {
  const auto split =
      train_stream({"--validation.split", "0.3", "--validation.dataset_path", "None"}, "split", 2);
  expect_trained(split);
  EXPECT_TRUE(metrics("split").back().contains("validation_loss"));
  const Words mix = {"--training.dataset_path", "None", "--training.mix",
                     "[{path = \"rows.jsonl\", weight = 2}, {path = \"corpus/train\"}]",
                     "--validation.no_enable"};
  expect_trained(train_stream(mix, "mix1", 1));
  expect_trained(train_stream(mix, "mix2", 2));
  expect_same_losses("mix1", "mix2");
  EXPECT_TRUE(fs::exists(path("mix1/row_counts.txt.1")));
}

TEST_F(StreamedTraining, TellsThatTheFilesHaveChanged) {
  expect_trained(train_stream(without_validation({"--training.steps", "2"}), "run"));
  spill(path("rows.jsonl"), test::slurp(path("rows.jsonl")) + "{\"text\": \"one more\"}\n");
  const auto on = train_stream(without_validation({"--training.steps", "3"}), "run");
  expect_trained(on);
  EXPECT_THAT(on.err, AllOf(HasSubstr("names or sizes of the training data's files are not what"),
                            HasSubstr("rows are counted anew")));
}

// The folder that the files lie in is not what they are told by.
TEST_F(StreamedTraining, ACorpusMayBeMovedOrCopied) {
  fs::create_directory(path("copy"));
  fs::copy_file(path("rows.jsonl"), path("copy/rows.jsonl"));
  const auto go_on = [&](const std::string& folder, const char* steps, Words more) {
    more.insert(more.end(), {"--training.steps", steps});
    const auto result = train_stream(without_validation(more), folder);
    expect_trained(result);
    return result.err;
  };
  const auto mix = [](const std::string& rows, const std::string& weight) {
    return Words{"--training.dataset_path", "None", "--training.mix",
                 "[{path = \"" + rows + "\", weight = " + weight + "}, {path = \"corpus/train\"}]"};
  };
  const std::string warning = "is not what the checkpoint";
  go_on("run", "2", {});
  EXPECT_THAT(go_on("run", "3", {"--training.dataset_path", "copy/rows.jsonl"}),
              Not(HasSubstr(warning)));
  go_on("mix", "2", mix("rows.jsonl", "2"));
  EXPECT_THAT(go_on("mix", "3", mix("copy/rows.jsonl", "2")), Not(HasSubstr(warning)));
  EXPECT_THAT(go_on("mix", "4", mix("copy/rows.jsonl", "3")), HasSubstr("training.mix " + warning));
}

TEST_F(StreamedTraining, AnotherTokenizerIsRefused) {
  const auto go_on = [&](const std::string& steps, Words more = {}) {
    more.insert(more.end(), {"--training.steps", steps});
    return train_stream(without_validation(more), "run");
  };
  expect_trained(go_on("2"));
  const auto made = run({"tokenizer", "train", "--input", "rows.jsonl", "--vocab-size", "300",
                         "--output", "other/tokenizer.json"});
  ASSERT_EQ(made.status, 0) << made.err;
  expect_user_error(
      go_on("3", {"--model.hf_assets_path", "other"}),
      {"model.hf_assets_path", "another tokenizer (that of 'other') than the checkpoint of step 2",
       "(then in '" + path("tokenizer").string() + "')",
       "checkpoint.exclude_from_loading = [\"dataloader\"]"});
  expect_trained(go_on("3"));
  expect_trained(go_on(
      "4", {"--model.hf_assets_path", "other", "--checkpoint.exclude_from_loading", "dataloader"}));
  // Checkpoints of earlier versions know no tokenizer.
  const auto place = path("run/checkpoint/step-4/manifest.json");
  auto manifest = nlohmann::json::parse(test::slurp(place));
  ASSERT_EQ(manifest["trainer"].erase("tokenizer"), 1u);
  manifest.erase("checksum");
  manifest["checksum"] = hash_hex(manifest.dump());
  spill(place, manifest.dump());
  expect_trained(go_on("5"));
}

TEST_F(StreamedTraining, WhatIsBadIsToldAtTheEndAndListed) {
  fs::create_directory(path("mixed"));
  spill(path("mixed/rows.jsonl"), "{\"text\": 1}\n" + test::slurp(path("rows.jsonl")));
  spill(path("mixed/broken.parquet"), "PAR1 and no more");
  const auto result = train_stream(
      without_validation({"--training.dataset_path", "mixed", "--training.bad_documents", "skip",
                          "--training.steps", "2"}),
      "run");
  expect_trained(result);
  EXPECT_THAT(result.err,
              HasSubstr("bad documents of the training data were left out, counted in each pass "
                        "anew and with those that were only read ahead"));
  EXPECT_THAT(test::slurp(path("run/bad_documents.txt")),
              AllOf(HasSubstr("mixed/broken.parquet: "), HasSubstr("mixed/rows.jsonl:1: ")));
  EXPECT_THAT(test::slurp(path("run/summary.md")), HasSubstr("(bad_documents.txt)"));
}

TEST_F(StreamedTraining, AMisspeltFieldIsFoundBeforeTheModelIsMade) {
  expect_user_error(
      train_stream(without_validation({"--training.text_field", "txet"}), "run"),
      {"training.dataset_path", "rows.jsonl:1: there is no field \"txet\" (training.text_field)"});
  expect_user_error(train_stream(without_validation({"--training.text_field", "txet",
                                                     "--training.bad_documents", "skip"}),
                                 "run"),
                    {"txet"});
}

}  // namespace
}  // namespace longhaul
