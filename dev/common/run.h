// run.h - the folder of a run and its checkpoints.
#pragma once
#include <algorithm>

#include <dirent.h>
#include <unistd.h>

#include "dev/common/checkpoint.h"  // Checkpoint
#include "dev/common/errors.h"      // fatal, format
#include "dev/common/files.h"       // file_error, is_folder, make_folders, OutFile
#include "dev/common/flags.h"       // saved_options
#include "dev/common/log.h"         // Progress
#include "dev/common/shards.h"      // TokenData

// ---- how far a run is ----------------------------------------------------------------------------------
// What a checkpoint remembers of its run: every setting, the model's sizes, and how far it was.
inline Metadata run_metadata(const Options& o, const Progress& at, const TokenData& train) {
  Metadata metadata = saved_options(o);
  metadata["step"] = std::to_string(at.step);
  metadata["tokens"] = std::to_string(at.tokens);
  metadata["data_position"] = std::to_string(at.position);
  metadata["train_data"] = train.inventory();
  return metadata;
}
inline Progress progress_from_metadata(const Metadata& metadata) {  // fatal if something is missing
  Progress at;
  at.step = count_from_metadata(metadata, "step");
  at.tokens = count_from_metadata(metadata, "tokens");
  at.position = count_from_metadata(metadata, "data_position");
  return at;
}

// ---- checkpoints by name -------------------------------------------------------------------------------
inline std::string checkpoint_path(const std::string& folder, size_t step) {
  return folder + format("/ckpt_%08zu.safetensors", step);
}

// Steps of the folder's checkpoints, ascending. Temporary files of a crashed run are not among them.
inline std::vector<size_t> list_checkpoints(const std::string& folder) {
  std::vector<size_t> steps;
  DIR* dir = opendir(folder.c_str());
  if (!dir) fatal(EXIT_ERROR, "%s", file_error(folder, "list").c_str());
  const std::string prefix = "ckpt_", suffix = ".safetensors";
  while (const dirent* entry = readdir(dir)) {
    const std::string name = entry->d_name;
    if (name.size() <= prefix.size() + suffix.size()) continue;
    uint64_t step;
    const std::string digits = name.substr(prefix.size(), name.size() - prefix.size() - suffix.size());
    const bool named_so = parse_count(digits, &step) && checkpoint_path(folder, step) == folder + "/" + name;
    if (named_so) steps.push_back(step);
  }
  closedir(dir);
  std::sort(steps.begin(), steps.end());
  return steps;
}

// Deletes all checkpoints up to `step` but the newest `keep` (0: deletes none). Only for after that of `step`
// is safely there.
inline void delete_old_checkpoints(const std::string& folder, size_t keep, size_t step) {
  std::vector<size_t> steps = list_checkpoints(folder);
  steps.erase(std::upper_bound(steps.begin(), steps.end(), step), steps.end());
  for (size_t i = 0; keep > 0 && i + keep < steps.size(); i++) {
    const std::string path = checkpoint_path(folder, steps[i]);
    if (unlink(path.c_str()) != 0) fatal(EXIT_ERROR, "%s", file_error(path, "delete").c_str());
  }
}

// The checkpoint to resume from: the file itself, or a folder's newest that is whole; one that is not is named
// on stderr and passed over. Fatal if there is none.
inline Checkpoint open_newest_checkpoint(const std::string& path) {
  if (!is_folder(path)) return Checkpoint::open(path);
  const std::vector<size_t> steps = list_checkpoints(path);
  for (size_t i = steps.size(); i-- > 0;) {
    Checkpoint checkpoint;
    const std::string error = checkpoint.try_open(checkpoint_path(path, steps[i]));
    if (error.empty()) return checkpoint;
    warn(error + "; trying the one before");
  }
  const std::string exported = path + "/model.safetensors";  // a folder of Hugging Face's kind
  if (steps.empty() && access(exported.c_str(), F_OK) == 0) return Checkpoint::open(exported);
  if (steps.empty()) {
    const std::string earlier = path + "/earlier-1";
    const std::string hint = is_folder(earlier) ? "; an earlier run is in " + earlier : "";
    fatal(EXIT_ERROR, "%s: holds no checkpoint; expected ckpt_*.safetensors%s", path.c_str(), hint.c_str());
  }
  fatal(EXIT_ERROR, "%s: none of its %zu checkpoints can be loaded", path.c_str(), steps.size());
}

// The folder that a resumed run goes on in: the one given, or the one the file is in.
inline std::string folder_of(const std::string& path) {
  if (is_folder(path)) return path;
  const size_t slash = path.rfind('/');
  return slash == std::string::npos ? "." : slash == 0 ? "/" : path.substr(0, slash);
}

// Moves checkpoints from step `first` on into the folder <name>-<number> of their own; from step 0 on, the log
// too. So nothing is lost, and a later --resume cannot take the old for the new. Returns that folder, "" if
// nothing was there.
inline std::string move_aside(const std::string& folder, const char* name, size_t first) {
  std::vector<std::string> files;
  for (size_t step : list_checkpoints(folder))
    if (step >= first) files.push_back(checkpoint_path(folder, step));
  const std::string log = folder + "/log.jsonl";
  if (first == 0 && access(log.c_str(), F_OK) == 0) files.push_back(log);
  if (files.empty()) return "";
  std::string aside;
  for (int n = 1; aside.empty() || access(aside.c_str(), F_OK) == 0; n++)
    aside = folder + format("/%s-%d", name, n);
  make_folders(aside);
  for (const std::string& file : files)
    if (rename(file.c_str(), (aside + file.substr(folder.size())).c_str()) != 0)
      fatal(EXIT_ERROR, "%s", file_error(file, "move").c_str());
  OutFile::sync_folder(log);
  return aside;
}
