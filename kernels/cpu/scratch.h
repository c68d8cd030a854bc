// Memory that lives as long as one call.
#pragma once

#include <cstddef>
#include <cstdlib>

namespace {

class Scratch {
  public:
    explicit Scratch(size_t size) : start_(std::aligned_alloc(64, (size + 64) / 64 * 64)) {}
    ~Scratch() { std::free(start_); }
    Scratch(const Scratch&) = delete;
    Scratch& operator=(const Scratch&) = delete;
    template <class Element>
    Element* as() const {
        return static_cast<Element*>(start_);
    }

  private:
    void* start_;
};

}  // namespace
