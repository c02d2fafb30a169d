//! The data of a VM, from its VMI and from the volumes that kubelet mounts in its pod.
//!
//! The agent reads each Secret in the pod's volume, so that it needs no right to read Secrets by the API. KubeVirt
//! names the volumes (`pkg/virt-controller/services/rendervolumes.go`). `options` names those that only
//! annotations ask for.

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use bytes::Bytes;
use metadata_content::record::{USER_DATA_MAX, is_network_config, is_network_data};
use std::collections::BTreeMap;
use std::sync::Arc;

use super::{KEY_BYTES_PER_VM, KEYS_PER_VM, PodVolumes, PublicKeyError, PublicKeys, VmiProblem, VolumeFiles};
use crate::kubevirt::vmi::{CloudInit, LocalRef, Vmi};
use crate::kubevirt::{self, KubevirtOptions};
use crate::pods::MAX_VOLUMES;

/// Most keys of custom metadata of one VM (VEP 100).
pub const METADATA_KEYS: usize = 16;
/// Most characters of one custom metadata value (VEP 100).
pub const METADATA_CHARS: usize = 256;

/// Keys of an annotated Secret or ConfigMap; the first that exists counts.
const USER_KEYS: [&str; 3] = ["user-data", "userdata", "userData"];
const VENDOR_KEYS: [&str; 3] = ["vendor-data", "vendordata", "vendorData"];

/// The data found for a VM.
#[derive(Default, PartialEq)]
pub(super) struct Data {
    pub(super) user: Option<Bytes>,
    pub(super) vendor: Option<Bytes>,
    pub(super) network: Option<NetworkDocument>,
    pub(super) keys: Vec<String>,
    pub(super) metadata: BTreeMap<String, String>,
    pub(super) token: Option<Bytes>,
}

/// A network document as text. Its content determines its kind, because KubeVirt puts either kind on either disk
/// without inspection.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum NetworkDocument {
    /// cloud-init's network-config.
    Config(String),
    /// OpenStack's `network_data.json`.
    Data(String),
}

/// The sources of a VM's data.
pub(super) struct DataSources<'a> {
    pub(super) vmi: &'a Vmi,
    pub(super) read: &'a dyn PodVolumes,
    pub(super) options: &'a KubevirtOptions,
}

/// Reads all data of a VM.
pub(super) fn data(places: &DataSources<'_>, problems: &mut Vec<VmiProblem>) -> Data {
    // The first volume counts, as in KubeVirt (ReadCloudInitVolumeDataSource).
    let mut volumes = places.vmi.spec.volumes.iter();
    let cloud_init = volumes.find_map(|volume| Some((volume.name.as_str(), volume.cloud_init()?)));
    let mut taken = |found: Found| {
        found.unwrap_or_else(|problem| {
            problems.push(problem);
            None
        })
    };
    let user = taken(places.user_data(cloud_init));
    let vendor = taken(places.vendor_data());
    let network = taken(places.network_data(cloud_init));
    let has_network = network.is_some();
    let network = network.as_deref().and_then(in_form);
    if has_network && network.is_none() {
        problems.push(VmiProblem::NetworkForm);
    }
    let keys = places.public_keys(problems);
    let metadata = places.metadata(cloud_init, problems);
    Data { user, vendor, network, keys, metadata, token: places.token() }
}

/// A payload, if the VM has it.
type Found = Result<Option<Bytes>, VmiProblem>;

impl DataSources<'_> {
    /// The files of a volume of the pod.
    fn files(&self, field: &'static str, volume: &str) -> Result<VolumeFiles, VmiProblem> {
        let volume = || volume.to_owned();
        match self.read.files(&volume()) {
            Ok(Some(files)) => Ok(files),
            Ok(None) => Err(VmiProblem::Volume { field, volume: volume() }),
            Err(reason) => Err(VmiProblem::Unreadable { field, volume: volume(), reason }),
        }
    }

    /// Takes the annotation's text, else the object that an annotation names, else the cloud-init volume.
    fn user_data(&self, cloud_init: Option<(&str, &CloudInit)>) -> Found {
        let named = [kubevirt::USER_DATA_SECRET, kubevirt::USER_DATA_CONFIGMAP];
        let annotated = self.annotated("user-data", kubevirt::USER_DATA, named, &USER_KEYS)?;
        if annotated.is_some() {
            return Ok(annotated);
        }
        let Some((volume, cloud_init)) = cloud_init else { return Ok(None) };
        self.cloud_init(&CloudInitField {
            field: "userData",
            base64_field: "userDataBase64",
            inline: cloud_init.user_data.as_deref(),
            base64: cloud_init.user_data_base64.as_deref(),
            secret: cloud_init.secret_ref.as_ref(),
            volume: format!("{volume}-udata"),
            keys: &["userdata", "userData"],
        })
    }

    fn vendor_data(&self) -> Found {
        let named = [kubevirt::VENDOR_DATA_SECRET, kubevirt::VENDOR_DATA_CONFIGMAP];
        let annotated = self.annotated("vendor-data", kubevirt::VENDOR_DATA, named, &VENDOR_KEYS)?;
        Ok(annotated.or_else(|| self.options.vendor_data.clone().map(Bytes::from)))
    }

    fn network_data(&self, cloud_init: Option<(&str, &CloudInit)>) -> Found {
        let Some((volume, cloud_init)) = cloud_init else { return Ok(None) };
        self.cloud_init(&CloudInitField {
            field: "networkData",
            base64_field: "networkDataBase64",
            inline: cloud_init.network_data.as_deref(),
            base64: cloud_init.network_data_base64.as_deref(),
            secret: cloud_init.network_data_secret_ref.as_ref(),
            volume: format!("{volume}-ndata"),
            keys: &["networkdata", "networkData"],
        })
    }

    /// The payload of annotations: the text of one, or the Secret or ConfigMap that another names and the pod mounts.
    fn annotated(
        &self,
        field: &'static str,
        inline: &str,
        named: [&str; 2],
        keys: &'static [&'static str; 3],
    ) -> Found {
        if let Some(text) = self.vmi.annotation(inline) {
            return bounded(field, text.to_owned().into()).map(Some);
        }
        if named.iter().all(|name| self.vmi.annotation(name).is_none()) {
            return Ok(None);
        }
        let volume = kubevirt::volume(field);
        let files = self.files(field, &volume)?;
        match first(&files, keys) {
            Some(bytes) => bounded(field, bytes).map(Some),
            None => Err(VmiProblem::Key { field, volume, keys: words(keys) }),
        }
    }

    /// A Secret takes precedence over a value in the VMI.
    fn cloud_init(&self, from: &CloudInitField<'_>) -> Found {
        let field = from.field;
        // Plain text takes precedence over base64, as in KubeVirt (readRawOrBase64Data).
        let inline = match (from.inline, from.base64) {
            (Some(text), _) if !text.is_empty() => Some(Bytes::from(text.to_owned())),
            (_, Some(packed)) if !packed.is_empty() => {
                let bytes = STANDARD.decode(packed.trim_ascii());
                Some(bytes.map_err(|_| VmiProblem::Base64 { field: from.base64_field })?.into())
            }
            _ => None,
        };
        if from.secret.is_none_or(|secret| secret.name.is_empty()) {
            return inline.map(|bytes| bounded(field, bytes)).transpose();
        }
        let volume = from.volume.clone();
        let files = self.files(field, &volume)?;
        match first(&files, from.keys).or(inline) {
            Some(bytes) => bounded(field, bytes).map(Some),
            None => Err(VmiProblem::Key { field, volume, keys: words(from.keys) }),
        }
    }

    /// The keys of all Secrets in the order of the VMI, one for each line. Beyond a limit of the VM the rest is not
    /// read.
    fn public_keys(&self, problems: &mut Vec<VmiProblem>) -> Vec<String> {
        let credentials = self.vmi.spec.access_credentials.iter();
        let by_metadata = credentials.filter_map(|credential| credential.ssh_public_key.as_ref());
        let by_metadata = by_metadata.filter(|key| key.propagation_method.is_by_metadata());
        let secrets: Vec<_> = by_metadata.filter_map(|key| key.source.secret.as_ref()).collect();
        if secrets.len() > MAX_VOLUMES {
            problems.push(VmiProblem::Credentials { limit: MAX_VOLUMES, found: secrets.len() });
            return Vec::new();
        }
        let (mut keys, mut bytes) = (Vec::new(), 0);
        for secret in secrets {
            let secret = &secret.secret_name;
            let found = self.keys_of(secret).unwrap_or_else(|problem| {
                problems.push(problem);
                Arc::default()
            });
            bytes += found.keys.iter().map(String::len).sum::<usize>();
            let error = match &found.error {
                Some(error) => Some(error.clone()),
                None if keys.len() + found.keys.len() > KEYS_PER_VM => Some(PublicKeyError::TooManyOfVm),
                None if bytes > KEY_BYTES_PER_VM => Some(PublicKeyError::TooLongOfVm),
                None => None,
            };
            if let Some(reason) = error {
                problems.push(VmiProblem::PublicKeys { secret: secret.clone(), reason });
                return Vec::new();
            }
            let other = found.other_files.iter().cloned();
            problems.extend(other.map(|file| VmiProblem::PublicKey { secret: secret.clone(), file }));
            keys.extend(found.keys.iter().cloned());
        }
        keys
    }

    fn keys_of(&self, secret: &str) -> Result<Arc<PublicKeys>, VmiProblem> {
        const FIELD: &str = "accessCredentials";
        let volume = credential_volume(secret);
        match self.read.public_keys(&volume) {
            Ok(Some(keys)) => Ok(keys),
            Ok(None) => Err(VmiProblem::Volume { field: FIELD, volume }),
            Err(reason) => Err(VmiProblem::Unreadable { field: FIELD, volume, reason }),
        }
    }

    /// Custom metadata: the VMI's, then the Secret's, which replaces equal keys. Values that cannot be served become
    /// problems.
    fn metadata(
        &self,
        cloud_init: Option<(&str, &CloudInit)>,
        problems: &mut Vec<VmiProblem>,
    ) -> BTreeMap<String, String> {
        let Some((volume, cloud_init)) = cloud_init else { return BTreeMap::new() };
        let mut all: BTreeMap<String, Bytes> =
            cloud_init.meta_data.iter().map(|(key, value)| (key.clone(), value.clone().into())).collect();
        if cloud_init.meta_data_secret_ref.as_ref().is_some_and(|secret| !secret.name.is_empty()) {
            let volume = format!("{volume}-mdata");
            match self.files("metaDataSecretRef", &volume) {
                Ok(files) => all.extend(files.into_iter().filter(|(key, _)| !key.starts_with(".."))),
                Err(problem) => problems.push(problem),
            }
        }
        let mut kept = BTreeMap::new();
        for (key, value) in all {
            match custom(&key, &value) {
                _ if kept.len() == METADATA_KEYS => {
                    problems.push(VmiProblem::Metadata { key, reason: "expected at most 16 keys" });
                }
                Ok(value) => _ = kept.insert(key, value),
                Err(reason) => problems.push(VmiProblem::Metadata { key, reason }),
            }
        }
        kept
    }

    /// The service account's token. kubelet may mount it late, so nothing else waits for it.
    fn token(&self) -> Option<Bytes> {
        self.options.tokens.iter().find_map(|place| {
            let (volume, file) = place.split_once('/')?;
            self.read.files(volume).ok().flatten()?.remove(file)
        })
    }
}

/// A field of a cloud-init volume, in its three forms.
struct CloudInitField<'a> {
    field: &'static str,
    base64_field: &'static str,
    inline: Option<&'a str>,
    base64: Option<&'a str>,
    secret: Option<&'a LocalRef>,
    volume: String,
    keys: &'static [&'static str],
}

/// The volume of an access credential's Secret. Every version of KubeVirt uses names of up to 51 bytes
/// unchanged. Before 1.9 pods with longer names failed; later versions shorten them
/// (SanitizeAccessCredentialVolumeName).
fn credential_volume(secret: &str) -> String {
    const SUFFIX: &str = "access-cred";
    /// Longest DNS label (RFC 1123 §2.1).
    const BYTES: usize = 63;
    let name = format!("{secret}-{SUFFIX}");
    // Reserve two hyphens and eight digits for FNV-1a's 32 bits (RFC 9923).
    match secret.get(..BYTES - SUFFIX.len() - 10) {
        Some(start) if name.len() > BYTES => {
            let hash = secret
                .bytes()
                .fold(0x811c_9dc5_u32, |hash, byte| (hash ^ u32::from(byte)).wrapping_mul(0x0100_0193));
            format!("{start}-{hash:08x}-{SUFFIX}")
        }
        _ => name,
    }
}

fn first(files: &VolumeFiles, keys: &[&str]) -> Option<Bytes> {
    keys.iter().find_map(|key| files.get(*key)).cloned()
}

fn words(keys: &[&str]) -> &'static str {
    match keys {
        ["userdata", ..] => "`userdata` or `userData`",
        ["networkdata", ..] => "`networkdata` or `networkData`",
        ["vendor-data", ..] => "`vendor-data`, `vendordata` or `vendorData`",
        _ => "`user-data`, `userdata` or `userData`",
    }
}

fn bounded(field: &'static str, bytes: Bytes) -> Result<Bytes, VmiProblem> {
    let limit = USER_DATA_MAX as usize;
    match bytes.len() {
        found if found > limit => Err(VmiProblem::TooLarge { field, limit, found }),
        _ => Ok(bytes),
    }
}

/// The kind of a network document, as clients detect it.
fn in_form(bytes: &[u8]) -> Option<NetworkDocument> {
    let text = std::str::from_utf8(bytes).ok()?;
    match text.into() {
        value if is_network_config(&value) => Some(NetworkDocument::Config(text.to_owned())),
        value if is_network_data(&value) => Some(NetworkDocument::Data(text.to_owned())),
        _ => None,
    }
}

/// Checks the value of a custom key.
fn custom(key: &str, value: &[u8]) -> Result<String, &'static str> {
    let named = |b: u8| b.is_ascii_alphanumeric() || matches!(b, b'.' | b'_' | b'-');
    if key.is_empty() || key.len() > METADATA_CHARS || !key.bytes().all(named) {
        return Err("expected letters, digits, `.`, `_` and `-`");
    }
    if metadata_content::record::RESERVED_KEYS.contains(&key) {
        return Err("the service sets this key itself");
    }
    let value = std::str::from_utf8(value).map_err(|_| "expected text")?;
    match value.chars().count() {
        0..=METADATA_CHARS => Ok(value.to_owned()),
        _ => Err("expected at most 256 characters"),
    }
}

#[cfg(test)]
mod tests {
    use super::credential_volume;

    #[test]
    fn a_credentials_volume_has_kubevirts_name_for_secrets_of_any_length() {
        let long = format!("team-a-{}", "x".repeat(50));
        assert_eq!(credential_volume("bob"), "bob-access-cred");
        assert_eq!(credential_volume(&long[..51]), format!("{}-access-cred", &long[..51]));
        assert_eq!(credential_volume(&long), format!("{}-b3f91219-access-cred", &long[..42]));
    }
}
