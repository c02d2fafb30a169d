//! The build id: a hash over the agent's sources.
//!
//! The agent prints it (`xdp-imds --version`). Programs that test the agent compare it with their own, and refuse an
//! agent that was built before the last change of its sources. `build.rs` lists what the hash covers.

/// The hash as 32 hexadecimal digits. It covers all crates and manifests of the agent, its eBPF objects, and
/// `Cargo.lock`.
pub const ID: &str = env!("XDP_IMDS_BUILD_ID");

/// The version and the build id, as `xdp-imds --version` prints them after the program's name.
pub const VERSION: &str = concat!(env!("CARGO_PKG_VERSION"), " (build ", env!("XDP_IMDS_BUILD_ID"), ")");
