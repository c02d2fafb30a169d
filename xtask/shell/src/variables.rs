//! Variables by which `cargo xtask test` and a person steer tests.

/// `1` turns the skip of a privileged test into a failure.
pub const REQUIRE_PRIVILEGED: &str = "XDP_IMDS_REQUIRE_PRIVILEGED";
/// Names the file that collects one line per privileged test, run or skipped.
pub const PRIVILEGED_LOG: &str = "XDP_IMDS_PRIVILEGED_LOG";
/// Names a checkout of cloud-init to run instead of the distribution's.
pub const CLOUD_INIT: &str = "XDP_IMDS_CLOUD_INIT";
/// The seed of random tests.
pub const SEED: &str = "XDP_IMDS_SEED";
