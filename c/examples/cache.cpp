// Registers parts of a buffer through the cache of a domain, from C++, and explains the path.
//
//   c++ -std=c++17 cache.cpp $(pkg-config --cflags --libs hmem) -o cache
#include <hmem.h>

#include <cstdint>
#include <iostream>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

namespace {

// Throws the message of an error, if there is an error.
void check(hmem_error *error)
{
    if (error == nullptr)
        return;
    std::string message = hmem_error_message(error);
    hmem_error_free(error);
    throw std::runtime_error(message);
}

// Closes an object at the end of a scope. A destructor cannot report an error.
template <auto Close> struct Closer {
    template <typename Object> void operator()(Object *object) const
    {
        hmem_error_free(Close(object));
    }
};

using Library = std::unique_ptr<hmem_library, Closer<hmem_close>>;
using Domain = std::unique_ptr<hmem_domain, Closer<hmem_domain_close>>;
using Region = std::unique_ptr<hmem_region, Closer<hmem_region_close>>;

Region lease(const Domain &domain, const std::uint8_t *memory, std::size_t length)
{
    hmem_region *region;
    auto address = static_cast<std::uint64_t>(reinterpret_cast<std::uintptr_t>(memory));
    check(hmem_cache_get(domain.get(), address, length, HMEM_SEND | HMEM_RECV, &region));
    return Region(region);
}

void run()
{
    hmem_open_attr open_attr{};
    open_attr.size = sizeof open_attr;
    open_attr.flags = HMEM_OPEN_SOFTWARE;
    hmem_library *opened;
    check(hmem_open(&open_attr, &opened));
    Library library(opened);

    hmem_domain_attr attr{};
    attr.size = sizeof attr;
    attr.flags = HMEM_DOMAIN_CACHE;
    attr.cache_max_count = 100;
    hmem_domain *on_nic;
    check(hmem_domain_open(library.get(), "loopback/hardware", &attr, &on_nic));
    Domain domain(on_nic);

    // The cache registers the buffer once. Hold a lease while a transfer uses its keys.
    std::vector<std::uint8_t> buffer(1 << 20);
    for (int request = 0; request < 1000; request++) {
        Region region = lease(domain, buffer.data(), 65536);
        std::uint64_t local;
        check(hmem_region_local_key(region.get(), &local));
    }
    hmem_cache_counts counts{};
    counts.size = sizeof counts;
    check(hmem_cache_statistics(domain.get(), &counts));
    std::cout << counts.hits << " hits, " << counts.misses << " misses\n";

    // Before the memory is freed in a way that no monitor sees.
    check(hmem_cache_invalidate(domain.get(), reinterpret_cast<std::uintptr_t>(buffer.data()),
                                buffer.size()));

    hmem_selection selection{};
    selection.size = sizeof selection;
    selection.memory = "simulated:0";
    char *json;
    bool passed;
    check(hmem_domain_explain(domain.get(), &selection, &json, &passed));
    std::cout << json << '\n' << (passed ? "there is a path\n" : "there is no path\n");
    hmem_string_free(json);
}

} // namespace

int main()
{
    try {
        run();
    } catch (const std::exception &error) {
        std::cerr << error.what() << '\n';
        return 1;
    }
    return 0;
}
