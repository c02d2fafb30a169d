//! The environment variables that `cargo xtask` and people set for tests and programs.

/// `1` makes a skipped privileged test a failure.
pub const REQUIRE_PRIVILEGED: &str = "XDP_IMDS_REQUIRE_PRIVILEGED";
/// The file that collects one line for each privileged test, run or skipped.
pub const PRIVILEGED_LOG: &str = "XDP_IMDS_PRIVILEGED_LOG";
/// A checkout of cloud-init to run instead of the distribution's.
pub const CLOUD_INIT: &str = "XDP_IMDS_CLOUD_INIT";
/// The seed of randomised tests.
pub const SEED: &str = "XDP_IMDS_SEED";
/// Set: a verb's own program prints its help. Otherwise `cargo xtask` prints it from the book, which is made so.
pub const PROGRAM_HELP: &str = "XDP_IMDS_PROGRAM_HELP";
/// Set by `cargo xtask ci` for its steps: the programs of all verbs are built, in the directory of the profile `dev`.
pub const BUILT: &str = "XDP_IMDS_BUILT";
