//! One-line helps of the verbs that are programs of their own. `cargo xtask --help` and that program show the same.

/// `cargo xtask book`.
pub const BOOK: &str =
    "Write the generated pages of the book, check README and book against the code, and build it";
/// `cargo xtask build-ebpf`.
pub const BUILD_EBPF: &str =
    "Rebuild the eBPF object from source, or check that the committed one matches its source";
/// `cargo xtask deb`.
pub const DEB: &str = "Make the Debian package, check its contents, and install, use and purge it on a throw-away copy of this system";
/// `cargo xtask demo`.
pub const DEMO: &str = "Run a demo: guests on real taps ask the real agent and get their own metadata";
/// `cargo xtask dist`.
pub const DIST: &str = "Make every file of a release for every architecture, reproducible byte for byte: archives, packages, image, bills of materials, checksums";
/// `cargo xtask guest`.
pub const GUEST: &str = "Boot a real Debian guest on a served tap and report what its cloud-init did";
/// `cargo xtask haul`.
pub const HAUL: &str =
    "Send millions of large answers to two kinds of guests, with and without loss, and fail on any stall";
/// `cargo xtask image`.
pub const IMAGE: &str = "Write the agent as an OCI image, reproducible byte for byte";
/// `cargo xtask kernels`.
pub const KERNELS: &str = "Boot older and newer kernels in QEMU, and run chosen tests of the agent inside";
/// `cargo xtask lab`.
pub const LAB: &str = "Keep a lab up: a node and guests to work with by hand";
/// `cargo xtask load`.
pub const LOAD: &str = "Load or upgrade the agent on this host or on others by ssh, and wait until it serves";
/// `cargo xtask manifests`.
pub const MANIFESTS: &str = "Render and check the deployment manifests, without a cluster";
/// `cargo xtask run`.
pub const RUN: &str = "Build the agent and run it in the foreground on this host";
/// `cargo xtask schemas`.
pub const SCHEMAS: &str =
    "Make the extract of published schemas that tests check objects against, or check that it is up to date";
/// `cargo xtask soak`.
pub const SOAK: &str = "Accelerated soak test: churn, restarts, hostile guests; checks for leaks";
/// `cargo xtask storm`.
pub const STORM: &str = "Boot thousands of guests at once on the agent and on peers, and measure";
/// `cargo xtask traffic`.
pub const TRAFFIC: &str = "Measure what steering costs guests' other traffic, by program and kind of frame";
/// `cargo xtask unload`.
pub const UNLOAD: &str = "Open the taps of this host or of others, and take away what `load` has put there";
