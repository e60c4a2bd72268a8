// checkpoint.h - what a checkpoint says about itself: the metadata of its safetensors file.
//
// Tensors are named model.<name>, adam_m.<name> and adam_v.<name> after the table in config.h. The metadata are
// strings: the model's sizes by the names of their flags, whatever else the trainer adds (step, tokens, every
// other setting), and what safetensors.h adds (format_version, checksum).
#pragma once
#include "config.h"       // Config, ARCH_NAMES
#include "options.h"      // set_flag, model_problem: the same limits as on the command line
#include "safetensors.h"  // checkpoint_write, Checkpoint

using Metadata = std::map<std::string, std::string>;

inline Metadata config_to_metadata(const Config& c) {
  return {{"arch", ARCH_NAMES[int(c.arch)]}, {"layers", std::to_string(c.L)}, {"width", std::to_string(c.C)},
          {"heads", std::to_string(c.NH)},   {"ffn", std::to_string(c.F)},    {"block-size", std::to_string(c.S)},
          {"context", std::to_string(c.T)},  {"vocab", std::to_string(c.V)}};
}

// Reads the sizes back. Returns the error, empty when all is well: a file from elsewhere may say anything.
inline std::string config_from_metadata(const Metadata& metadata, Config* config) {
  Options o;
  for (const auto& field : config_to_metadata(Config())) {
    const auto found = metadata.find(field.first);
    if (found == metadata.end()) return "metadata lacks " + field.first;
    const std::string allowed = set_flag(o, *find_flag(field.first), found->second);
    if (!allowed.empty())
      return "metadata: " + field.first + " is '" + found->second + "', expected " + allowed;
  }
  const std::string problem = model_problem(o);
  if (!problem.empty()) return "metadata: " + problem;
  *config = model_config(o);
  return "";
}

// A number of the metadata, such as "step".
inline std::string count_from_metadata(const Metadata& metadata, const std::string& name, size_t* value) {
  const auto found = metadata.find(name);
  if (found == metadata.end()) return "metadata lacks " + name;
  uint64_t n = 0;
  if (!parse_count(found->second, &n)) return "metadata: " + name + " is '" + found->second + "', expected a whole number";
  *value = n;
  return "";
}
