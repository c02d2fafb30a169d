//! The build id: a hash over the sources of the agent.
//!
//! The agent prints it (`xdp-imds --version`), and programs that test the agent compare it with their own: an agent
//! built before the last change of its sources is refused instead of tested. `build.rs` says what is hashed.

/// The hash as 32 hexadecimal digits: all crates and manifests of the agent, its eBPF objects, and `Cargo.lock`.
pub const ID: &str = env!("XDP_IMDS_BUILD_ID");

/// The version and the build id, as `xdp-imds --version` prints them after the program's name.
pub const VERSION: &str = concat!(env!("CARGO_PKG_VERSION"), " (build ", env!("XDP_IMDS_BUILD_ID"), ")");
