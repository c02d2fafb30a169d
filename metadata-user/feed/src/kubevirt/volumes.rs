//! What translations read of pods' volumes: within a budget for each VM, and only once for each version of a volume.
//!
//! A VMI's author can have it translated as often as the API server takes patches. So the parsed content of a volume is
//! kept until kubelet replaces the volume, the VM stops using it, or its pod ends. Tenants share the memory for that.

use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use metadata_common::share::{FairShare, ShareReport, Tenant};

use super::translate::{PodVolumes, PublicKeys, VolumeFiles};
use crate::pods::{MAX_VOLUMES, PodUid, VOLUME_BYTES, VolumeReading, VolumeVersion, Volumes};

/// Most bytes that one translation reads of all volumes of a VM.
pub const VM_BYTES: usize = 8 << 20;
/// Most bytes of a Secret of public keys.
pub const CREDENTIAL_BYTES: usize = 256 << 10;
/// Most bytes of volumes' content that are kept parsed, for all VMs; more is read again for each translation.
pub const KEPT_BYTES: usize = 32 << 20;
/// Bytes of it that each tenant may use while anything is left.
const KEPT_FLOOR: usize = 256 << 10;

/// A volume of a pod.
#[derive(Clone, Copy, Debug)]
pub struct PodVolume<'a> {
    /// Whose pod it is.
    pub tenant: &'a Tenant,
    /// The pod.
    pub pod: &'a PodUid,
    /// The volume's name in the pod.
    pub name: &'a str,
}

/// Reads the volumes of pods. The errors' texts must not repeat any content.
pub trait ReadVolumes: Send + Sync {
    /// The files of a volume of at most `most` bytes; `None` if it does not exist yet.
    ///
    /// # Errors
    /// The reason.
    fn files(&self, volume: PodVolume<'_>, most: usize) -> Result<Option<VolumeFiles>, String>;

    /// The public keys in a volume of at most `most` bytes, and the volume's bytes.
    ///
    /// # Errors
    /// The reason.
    fn public_keys(
        &self,
        volume: PodVolume<'_>,
        most: usize,
    ) -> Result<Option<(Arc<PublicKeys>, usize)>, String> {
        let files = self.files(volume, most)?;
        Ok(files.map(|files| (Arc::new(PublicKeys::parse(&files)), weight(&files))))
    }

    /// Drops what is kept of a pod's volumes other than these.
    fn keep_only(&self, _pod: &PodUid, _volumes: &BTreeSet<String>) {}
}

impl<F: Fn(&PodUid, &str) -> Result<Option<VolumeFiles>, String> + Send + Sync> ReadVolumes for F {
    fn files(&self, volume: PodVolume<'_>, _most: usize) -> Result<Option<VolumeFiles>, String> {
        self(volume.pod, volume.name)
    }
}

fn weight(files: &VolumeFiles) -> usize {
    files.iter().map(|(key, bytes)| key.len() + bytes.len()).sum()
}

/// The volumes of one pod during one translation: they have a budget together, and their names are noted.
pub(super) struct BudgetedVolumes<'a> {
    read: &'a dyn ReadVolumes,
    tenant: &'a Tenant,
    pod: &'a PodUid,
    spent: RefCell<Spent>,
}

#[derive(Default)]
struct Spent {
    bytes: usize,
    names: BTreeSet<String>,
}

impl<'a> BudgetedVolumes<'a> {
    pub(super) fn new(read: &'a dyn ReadVolumes, tenant: &'a Tenant, pod: &'a PodUid) -> Self {
        Self { read, tenant, pod, spent: RefCell::default() }
    }

    /// The names of the volumes that were asked for.
    pub(super) fn into_names(self) -> BTreeSet<String> {
        self.spent.into_inner().names
    }

    /// Notes a volume. Returns the bytes that are left, and whether the volume counts: each counts once.
    fn open(&self, volume: &str) -> Result<(usize, bool), String> {
        let mut spent = self.spent.borrow_mut();
        let is_new = !spent.names.contains(volume);
        if is_new && spent.names.len() >= MAX_VOLUMES {
            return Err(format!("expected at most {MAX_VOLUMES} volumes with data for one VM, found more"));
        }
        if is_new {
            spent.names.insert(volume.to_owned());
        }
        Ok((VM_BYTES - spent.bytes, is_new))
    }

    fn spend(&self, bytes: usize, is_new: bool) -> Result<(), String> {
        let mut spent = self.spent.borrow_mut();
        spent.bytes += if is_new { bytes } else { 0 };
        match spent.bytes {
            0..=VM_BYTES => Ok(()),
            _ => {
                spent.bytes = VM_BYTES;
                Err(too_much())
            }
        }
    }

    /// An error of a volume that was read with `left` bytes left.
    fn explain(&self, reason: String, left: usize, most: usize) -> String {
        if left < most { format!("{reason}; {}", too_much()) } else { reason }
    }
}

fn too_much() -> String {
    format!("expected at most {VM_BYTES} bytes in all volumes of one VM; put less into its Secrets")
}

impl PodVolumes for BudgetedVolumes<'_> {
    fn files(&self, name: &str) -> Result<Option<VolumeFiles>, String> {
        let (left, is_new) = self.open(name)?;
        let volume = PodVolume { tenant: self.tenant, pod: self.pod, name };
        let found = self.read.files(volume, left.min(VOLUME_BYTES));
        let found = found.map_err(|reason| self.explain(reason, left, VOLUME_BYTES))?;
        self.spend(found.as_ref().map_or(0, weight), is_new)?;
        Ok(found)
    }

    fn public_keys(&self, name: &str) -> Result<Option<Arc<PublicKeys>>, String> {
        let (left, is_new) = self.open(name)?;
        let volume = PodVolume { tenant: self.tenant, pod: self.pod, name };
        let found = self.read.public_keys(volume, left.min(CREDENTIAL_BYTES));
        let found = found.map_err(|reason| self.explain(reason, left, CREDENTIAL_BYTES))?;
        self.spend(found.as_ref().map_or(0, |(_, bytes)| *bytes), is_new)?;
        Ok(found.map(|(keys, _)| keys))
    }
}

/// The pods' volumes on disk, with what was parsed of them.
#[derive(Debug)]
pub struct VolumeCache {
    volumes: Volumes,
    kept: Mutex<CachedVolumes>,
}

#[derive(Debug)]
struct CachedVolumes {
    share: FairShare,
    pods: HashMap<PodUid, BTreeMap<String, Entry>>,
    /// Volumes read from disk since the start.
    reads: u64,
}

#[derive(Debug)]
struct Entry {
    version: VolumeVersion,
    content: Content,
    tenant: Tenant,
    /// Bytes that count against the limit.
    weight: usize,
}

#[derive(Clone, Debug)]
enum Content {
    Files(Arc<VolumeFiles>),
    /// The keys, and the bytes of the volume.
    Keys(Arc<PublicKeys>, usize),
}

impl VolumeCache {
    /// Reads these volumes.
    #[must_use]
    pub fn new(volumes: Volumes) -> Self {
        let share = FairShare::new(KEPT_BYTES, KEPT_FLOOR);
        Self { volumes, kept: Mutex::new(CachedVolumes { share, pods: HashMap::new(), reads: 0 }) }
    }

    /// Bytes of content that are kept.
    #[must_use]
    pub fn bytes(&self) -> usize {
        self.kept().share.used()
    }

    /// How tenants share the memory for content that is kept.
    #[must_use]
    pub fn share(&self) -> ShareReport {
        ShareReport::of("volume_bytes", &self.kept().share)
    }

    /// Volumes that were read from disk since the start, rather than found unchanged.
    #[must_use]
    pub fn reads(&self) -> u64 {
        self.kept().reads
    }

    /// Releases contents that no VM uses any more. Call it about once a minute.
    pub fn sweep(&self) {
        self.volumes.sweep();
    }

    fn kept(&self) -> MutexGuard<'_, CachedVolumes> {
        self.kept.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The content of a volume, parsed again only if its version is new.
    fn content(
        &self,
        volume: PodVolume<'_>,
        most: usize,
        parse: impl FnOnce(&Volumes, crate::pods::VolumeContent) -> (Content, usize),
    ) -> Result<Option<Content>, String> {
        let PodVolume { tenant, pod, name } = volume;
        let known = self.kept().get(pod, name);
        let version = known.as_ref().map(|(version, _)| version);
        match self.volumes.read_new(pod, name, most, version) {
            Ok(VolumeReading::Unchanged) => Ok(known.map(|(_, content)| content)),
            Ok(VolumeReading::Absent) => {
                self.kept().drop_entry(pod, name);
                Ok(None)
            }
            Ok(VolumeReading::New(version, files)) => {
                let (content, weight) = parse(&self.volumes, files);
                let entry = Entry { version, content: content.clone(), tenant: tenant.clone(), weight };
                let mut kept = self.kept();
                kept.reads += 1;
                kept.drop_entry(pod, name);
                kept.add(pod, name, entry);
                Ok(Some(content))
            }
            Err(error) => {
                self.kept().drop_entry(pod, name);
                Err(error.to_string())
            }
        }
    }
}

impl ReadVolumes for VolumeCache {
    fn files(&self, volume: PodVolume<'_>, most: usize) -> Result<Option<VolumeFiles>, String> {
        let content = self.content(volume, most, |volumes, files| {
            let weight = files.weight();
            (Content::Files(Arc::new(volumes.share(files).into_map())), weight)
        })?;
        Ok(content.map(|content| match content {
            Content::Files(files) => (*files).clone(),
            // No volume holds both; nothing is found in one that holds keys.
            Content::Keys(..) => VolumeFiles::new(),
        }))
    }

    fn public_keys(
        &self,
        volume: PodVolume<'_>,
        most: usize,
    ) -> Result<Option<(Arc<PublicKeys>, usize)>, String> {
        let content = self.content(volume, most, |_, files| {
            let bytes = files.weight();
            let keys = PublicKeys::parse(&files.into_map());
            let weight = keys.weight();
            (Content::Keys(Arc::new(keys), bytes), weight)
        })?;
        Ok(content.map(|content| match content {
            Content::Keys(keys, bytes) => (keys, bytes),
            Content::Files(files) => (Arc::new(PublicKeys::parse(&files)), weight(&files)),
        }))
    }

    fn keep_only(&self, pod: &PodUid, volumes: &BTreeSet<String>) {
        let mut kept = self.kept();
        let Some(entries) = kept.pods.get(pod) else { return };
        let gone: Vec<_> = entries.keys().filter(|name| !volumes.contains(*name)).cloned().collect();
        for name in &gone {
            kept.drop_entry(pod, name);
        }
    }
}

impl CachedVolumes {
    fn get(&self, pod: &PodUid, name: &str) -> Option<(VolumeVersion, Content)> {
        let entry = self.pods.get(pod)?.get(name)?;
        Some((entry.version.clone(), entry.content.clone()))
    }

    /// Keeps an entry if its tenant has room for it.
    fn add(&mut self, pod: &PodUid, name: &str, entry: Entry) {
        if self.share.admit(&entry.tenant, entry.weight).is_ok() {
            self.pods.entry(pod.clone()).or_default().insert(name.to_owned(), entry);
        }
    }

    fn drop_entry(&mut self, pod: &PodUid, name: &str) {
        let Some(entries) = self.pods.get_mut(pod) else { return };
        if let Some(entry) = entries.remove(name) {
            self.share.release(&entry.tenant, entry.weight);
        }
        if entries.is_empty() {
            self.pods.remove(pod);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::{
        BudgetedVolumes, CREDENTIAL_BYTES, KEPT_BYTES, PodVolume, PodVolumes as _, ReadVolumes, Tenant,
        VM_BYTES, VolumeCache,
    };
    use crate::kubevirt::translate::{TranslationOutcome, VmiTranslation, translate};
    use crate::kubevirt::{KubevirtOptions, Vmi};
    use crate::pods::{Pod, PodUid, Tap, TapKind, Volumes};
    use metadata_content::record::RecordLimits;
    use serde_json::{Value, json};
    use std::collections::BTreeSet;
    use std::os::unix::fs::symlink;
    use std::{fs, path::PathBuf};

    /// kubelet's directory, and a cache of its volumes.
    struct Node {
        dir: tempfile::TempDir,
        cache: VolumeCache,
        versions: usize,
    }

    fn uid(pod: &str) -> PodUid {
        pod.parse().expect("a uid")
    }

    impl Node {
        fn new() -> Self {
            let dir = tempfile::tempdir().expect("a directory");
            let cache = VolumeCache::new(Volumes::new(dir.path()));
            Self { dir, cache, versions: 0 }
        }

        fn write(&mut self, pod: &str, volume: &str, key: &str, content: &str) {
            self.versions += 1;
            let below: PathBuf = [pod, "volumes", "kubernetes.io~secret", volume].iter().collect();
            let volume = self.dir.path().join(below);
            let version = format!("..v{}", self.versions);
            fs::create_dir_all(volume.join(&version)).expect("a directory");
            fs::write(volume.join(&version).join(key), content).expect("a file");
            symlink(&version, volume.join("..new")).expect("a link");
            fs::rename(volume.join("..new"), volume.join("..data")).expect("renamed");
        }

        fn translate(&self, vmi: &Value, pod: &str) -> VmiTranslation {
            let vmi = Vmi::from_value(vmi.clone()).expect("a VMI");
            let (uid, tenant) = (uid(pod), Tenant::namespace(&vmi.metadata.namespace));
            let mac = metadata_common::mac::Mac::default();
            let taps = vec![Tap { ifname: "tap0".into(), kind: TapKind::Tap, mac, queues: 1 }];
            let (vmi_uid, netns) = (vmi.metadata.uid.clone(), "/proc/1/ns/net".into());
            let pod = Pod { uid: uid.clone(), pid: 1, vmi: vmi_uid, netns, taps, nics: Vec::new() };
            let volumes = BudgetedVolumes::new(&self.cache, &tenant, &uid);
            let translation =
                translate(&vmi, &pod, &volumes, &KubevirtOptions::default(), &RecordLimits::DEFAULT);
            self.cache.keep_only(&uid, &volumes.into_names());
            translation
        }
    }

    /// A VMI with this many access credentials, `s0` and so on.
    fn vmi(credentials: usize) -> Value {
        let secret = |n: usize| {
            json!({"sshPublicKey": {
                "source": {"secret": {"secretName": format!("s{n}")}},
                "propagationMethod": {"noCloud": {}},
            }})
        };
        json!({
            "metadata": {"name": "web", "namespace": "shop", "uid": "b5e7c9d2-0c3f-4a52-8f2e-3d9a1c7b6e10"},
            "spec": {
                "domain": {"devices": {"interfaces": [
                    {"name": "default", "masquerade": {}, "macAddress": "02:00:00:00:00:01"},
                ]}},
                "networks": [{"name": "default", "pod": {}}],
                "accessCredentials": (0..credentials).map(secret).collect::<Vec<_>>(),
            },
            "status": {"phase": "Running"},
        })
    }

    #[test]
    fn secrets_of_short_lines_are_a_problem_of_the_vmi_and_nothing_of_them_stays() {
        let mut node = Node::new();
        let lines = "k\n".repeat(1 << 19);
        for n in 0..12 {
            node.write("p", &format!("s{n}-access-cred"), "keys", &lines);
        }
        let VmiTranslation { outcome, problems, .. } = node.translate(&vmi(12), "p");
        assert!(matches!(outcome, TranslationOutcome::Expect(_)), "{outcome:?}");
        let text = problems.iter().map(ToString::to_string).collect::<String>();
        assert!(text.contains("accessCredentials") && text.contains(&CREDENTIAL_BYTES.to_string()), "{text}");
        assert!(text.len() < 8_192, "{} bytes", text.len());
        assert_eq!(node.cache.bytes(), 0);
        // Within the bytes of a Secret, its number of keys is a limit.
        for n in 0..12 {
            node.write("p", &format!("s{n}-access-cred"), "keys", &lines[..CREDENTIAL_BYTES - 4]);
        }
        let VmiTranslation { outcome, problems, .. } = node.translate(&vmi(12), "p");
        assert!(matches!(outcome, TranslationOutcome::Expect(_)), "{outcome:?}");
        assert!(problems[0].to_string().contains("256 public keys"), "{}", problems[0]);
        assert_eq!(node.cache.bytes(), 0, "no keys, no memory");
    }

    #[test]
    fn an_unchanged_volume_is_read_once_and_forgotten_with_its_pod() {
        let mut node = Node::new();
        node.write("p", "s0-access-cred", "keys", "ssh-ed25519 A one\nssh-ed25519 B two\n");
        let keys = |translation: VmiTranslation| match translation.outcome {
            TranslationOutcome::Record(record) => record.ssh_keys.len(),
            other => panic!("{other:?}"),
        };
        for _ in 0..100 {
            assert_eq!(keys(node.translate(&vmi(1), "p")), 2);
        }
        assert_eq!(node.cache.reads(), 1);
        assert!(node.cache.bytes() > 0);
        node.write("p", "s0-access-cred", "keys", "ssh-ed25519 A one\n");
        assert_eq!((keys(node.translate(&vmi(1), "p")), node.cache.reads()), (1, 2));
        assert_eq!(keys(node.translate(&vmi(0), "p")), 0);
        assert_eq!(node.cache.bytes(), 0, "the VM does not use it any more");
        node.translate(&vmi(1), "p");
        node.cache.keep_only(&uid("p"), &BTreeSet::new());
        assert_eq!(node.cache.bytes(), 0, "the pod has ended");
    }

    #[test]
    fn the_volumes_of_one_vm_have_a_budget_together() {
        let mut node = Node::new();
        let (tenant, pod) = (Tenant::namespace("shop"), uid("p"));
        let count = (VM_BYTES >> 20) + 1;
        (0..count).for_each(|n| node.write("p", &format!("v{n}"), "userdata", &"x".repeat(1_000_000)));
        let volumes = BudgetedVolumes::new(&node.cache, &tenant, &pod);
        for n in 0..count - 1 {
            volumes.files(&format!("v{n}")).expect("within the budget").expect("there");
            volumes.files(&format!("v{n}")).expect("it counts once").expect("there");
        }
        let error = volumes.files(&format!("v{}", count - 1)).expect_err("beyond the budget");
        assert!(error.contains("all volumes of one VM"), "{error}");
    }

    #[test]
    fn one_namespace_keeps_at_most_half_of_the_memory_for_volumes() {
        let mut node = Node::new();
        for n in 0..40 {
            let pod = format!("p{n}");
            node.write(&pod, "v", "userdata", &n.to_string().repeat(500_000));
            let tenant = Tenant::namespace("hostile");
            let read = PodVolume { tenant: &tenant, pod: &uid(&pod), name: "v" };
            node.cache.files(read, 1 << 20).expect("readable").expect("there");
        }
        assert!(
            node.cache.bytes() <= KEPT_BYTES / 2 && node.cache.bytes() > KEPT_BYTES / 4,
            "{}",
            node.cache.bytes()
        );
    }
}
