//! The annotations of kubevirt-imds, including those its documentation announces for later.

/// `"true"` or `"false"`: whether the feed serves the VM.
pub const ENABLED: &str = "imds.kubevirt.io/enabled";
/// User-data as text.
pub const USER_DATA: &str = "imds.kubevirt.io/user-data";
/// The name of a ConfigMap that holds user-data.
pub const USER_DATA_CONFIGMAP: &str = "imds.kubevirt.io/user-data-configmap";
/// The name of a Secret that holds user-data.
pub const USER_DATA_SECRET: &str = "imds.kubevirt.io/user-data-secret";
/// Vendor-data as text.
pub const VENDOR_DATA: &str = "imds.kubevirt.io/vendor-data";
/// The name of a ConfigMap that holds vendor-data.
pub const VENDOR_DATA_CONFIGMAP: &str = "imds.kubevirt.io/vendor-data-configmap";
/// The name of a Secret that holds vendor-data.
pub const VENDOR_DATA_SECRET: &str = "imds.kubevirt.io/vendor-data-secret";

/// The instance type the VM was made from: of the cluster, then of its namespace.
pub(super) const INSTANCE_TYPES: [&str; 2] =
    ["kubevirt.io/cluster-instancetype-name", "kubevirt.io/instancetype-name"];

/// The volume that mounts an annotated Secret or ConfigMap in the pod. `xdp-imds webhook` or the admission policy adds
/// it.
#[must_use]
pub fn volume(field: &str) -> String {
    format!("imds-{field}")
}
