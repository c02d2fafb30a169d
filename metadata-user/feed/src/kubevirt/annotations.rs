//! The annotations of kubevirt-imds, and those its documents announce.

/// `"true"` or `"false"`: whether the VM is served.
pub const ENABLED: &str = "imds.kubevirt.io/enabled";
/// User-data itself.
pub const USER_DATA: &str = "imds.kubevirt.io/user-data";
/// A ConfigMap with user-data.
pub const USER_DATA_CONFIGMAP: &str = "imds.kubevirt.io/user-data-configmap";
/// A Secret with user-data.
pub const USER_DATA_SECRET: &str = "imds.kubevirt.io/user-data-secret";
/// Vendor-data itself.
pub const VENDOR_DATA: &str = "imds.kubevirt.io/vendor-data";
/// A ConfigMap with vendor-data.
pub const VENDOR_DATA_CONFIGMAP: &str = "imds.kubevirt.io/vendor-data-configmap";
/// A Secret with vendor-data.
pub const VENDOR_DATA_SECRET: &str = "imds.kubevirt.io/vendor-data-secret";

/// The instancetype a VM was made from, of the cluster and of a namespace.
pub(super) const INSTANCE_TYPES: [&str; 2] =
    ["kubevirt.io/cluster-instancetype-name", "kubevirt.io/instancetype-name"];

/// The volume by which a pod has an annotated Secret or ConfigMap: `xdp-imds webhook` or the policy adds it.
#[must_use]
pub fn volume(field: &str) -> String {
    format!("imds-{field}")
}
