// checkpoint.h - writes checkpoints, and says what their metadata mean.
//
// A checkpoint is a safetensors file. Its tensors are named model.<name>, adam_m.<name> and adam_v.<name> after
// the table in config.h. Its metadata are strings: the model's sizes by the names of their flags, what the
// trainer adds (step, tokens, the other settings), format_version and checksum. It is written as a stream,
// tensor by tensor in chunks: a model may be larger than the memory left.
#pragma once
#include "check.h"        // fatal, checked_mul
#include "config.h"       // Config, ARCH_NAMES
#include "files.h"        // OutFile
#include "options.h"      // set_flag, model_problem: the same limits as on the command line
#include "safetensors.h"  // Checkpoint, Checksum

using Metadata = std::map<std::string, std::string>;

constexpr const char* CHECKPOINT_FORMAT = "rdattnres-1";  // metadata "format_version"

// ---- writing -------------------------------------------------------------------------------------------
struct CheckpointTensor {
  std::string name;
  std::vector<size_t> shape;
  std::function<void(size_t offset, size_t n, float* chunk)> get;  // copies elements offset .. offset+n-1
  size_t size() const {
    size_t n = 1;
    for (size_t d : shape) n = checked_mul(n, d, name.c_str());
    return n;
  }
};

// The JSON header, padded with spaces so that the data starts at a multiple of 64 bytes in the file.
inline std::string checkpoint_header(const Metadata& metadata, const std::vector<CheckpointTensor>& tensors) {
  std::string header = "{\"__metadata__\":{";
  for (const auto& entry : metadata)
    header += (header.back() == '{' ? "" : ",") + json_quote(entry.first) + ":" + json_quote(entry.second);
  header += "}";
  size_t offset = 0;
  for (const CheckpointTensor& t : tensors) {
    std::string shape;
    for (size_t d : t.shape) shape += (shape.empty() ? "" : ",") + std::to_string(d);
    const size_t bytes = checked_mul(t.size(), sizeof(float), t.name.c_str());
    const size_t end = checked_add(offset, bytes, t.name.c_str());
    header += "," + json_quote(t.name) + ":{\"dtype\":\"F32\",\"shape\":[" + shape + "],";
    header += format("\"data_offsets\":[%zu,%zu]}", offset, end);
    offset = end;
  }
  header += "}";
  while ((8 + header.size()) % 64 != 0) header += ' ';
  return header;
}

// Writes path, complete or not at all. Adds format_version and checksum to the metadata. The checksum is known
// only after the data: a place is kept for it and filled in at the end. Fatal if anything goes wrong.
inline void checkpoint_write(const std::string& path, Metadata metadata,
                             const std::vector<CheckpointTensor>& tensors) {
  const std::string place(16, '0'), quoted = "\"checksum\":\"";
  metadata["format_version"] = CHECKPOINT_FORMAT;
  metadata["checksum"] = place;
  const std::string header = checkpoint_header(metadata, tensors);
  const uint64_t length = header.size();
  OutFile file(path);
  file.write(&length, sizeof(length));
  file.write(header);

  uint64_t sum = metadata_checksum(metadata);
  std::vector<float> chunk(CHECKPOINT_CHUNK);
  for (const CheckpointTensor& t : tensors) {
    Checksum checksum(t.name, t.shape);
    for (size_t offset = 0, total = t.size(); offset < total; offset += CHECKPOINT_CHUNK) {
      const size_t n = std::min(CHECKPOINT_CHUNK, total - offset);
      t.get(offset, n, chunk.data());
      checksum.mix(chunk.data(), n);
      file.write(chunk.data(), n * sizeof(float));
    }
    sum += checksum.value;
  }
  const size_t at = sizeof(length) + header.find(quoted + place) + quoted.size();
  file.patch(at, checksum_text(sum).data(), place.size());
  file.commit();
}

// ---- metadata ------------------------------------------------------------------------------------------
inline Metadata config_to_metadata(const Config& c) {
  return {{"arch", ARCH_NAMES[int(c.arch)]}, {"layers", std::to_string(c.L)},
          {"width", std::to_string(c.C)},    {"heads", std::to_string(c.NH)},
          {"ffn", std::to_string(c.F)},      {"block-size", std::to_string(c.S)},
          {"context", std::to_string(c.T)},  {"vocab", std::to_string(c.V)}};
}

// Reads the sizes back. Returns the error, empty when all is well: a file from elsewhere may say anything.
inline std::string config_from_metadata(const Metadata& metadata, Config* config) {
  const auto version = metadata.find("format_version");
  if (version != metadata.end() && version->second != CHECKPOINT_FORMAT)
    return "metadata: format_version is '" + version->second + "', expected " + CHECKPOINT_FORMAT;
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
  if (!parse_count(found->second, &n))
    return "metadata: " + name + " is '" + found->second + "', expected a whole number";
  *value = n;
  return "";
}
