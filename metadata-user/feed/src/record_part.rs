//! Reads parts of a record from files, and derives a record's values from what a hypervisor knows of a VM.

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use metadata_common::run::is_home;
use metadata_content::parser;
use metadata_content::record::{Record, RecordError, RecordLimits, USER_DATA_MAX, Warning};
use rustix::io::Errno;
use serde_json::{Map, Value, json};
use std::fs::{File, Metadata, OpenOptions};
use std::io;
use std::io::Read as _;
use std::os::unix::fs::{FileTypeExt as _, MetadataExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// The file that applies to all VMs of the host.
pub const DEFAULTS: &str = "defaults.yaml";

/// Most bytes of a file with a part of a record.
pub const FILE_BYTES: usize = RecordLimits::DEFAULT.record_bytes;

/// Permission bits beyond read and write for the owner and read for the group. Records hold secrets.
pub const TOO_OPEN: u32 = 0o027;

/// The mode of a file that others than its owner and its group may read, or than its owner change; `None` without such a
/// file.
#[must_use]
pub fn open_mode(path: &Path) -> Option<u32> {
    let found = std::fs::metadata(path).ok().filter(Metadata::is_file)?;
    Some(found.mode() & 0o7777).filter(|mode| mode & TOO_OPEN != 0)
}

/// Record fields that may be in a separate file.
pub(crate) const PAYLOADS: [&str; 3] = ["user_data", "vendor_data", "vendor_data2"];

/// Why a file is not a part of a record.
#[derive(Clone, Debug, thiserror::Error)]
pub enum PartError {
    /// A file with a part of a record is invalid.
    #[error("{}: expected {expected}, found {found}", path.display())]
    File {
        /// The file.
        path: PathBuf,
        /// What was expected.
        expected: &'static str,
        /// What the file contains instead.
        found: String,
    },
    /// A file cannot be read.
    #[error("{}: expected {expected}: {error}", path.display())]
    Io {
        /// The file.
        path: PathBuf,
        /// What was expected of it.
        expected: &'static str,
        /// The kernel's error.
        error: Arc<io::Error>,
    },
}

fn io_error(path: &Path, expected: &'static str, error: io::Error) -> PartError {
    PartError::Io { path: path.to_owned(), expected, error: error.into() }
}

/// Reads a part of a record from a file, with its payloads' sources resolved; `None` if the file does not exist. Calls
/// `saw` with the path of each file before it reads it.
pub(crate) fn part(files: &Path, name: &str, mut saw: impl FnMut(&Path)) -> Result<Option<Value>, PartError> {
    let path = files.join(name);
    saw(&path);
    let unreadable = |error| io_error(&path, "a file that can be read", error);
    let Some(bytes) = read(&path, FILE_BYTES).map_err(unreadable)? else { return Ok(None) };
    let wrong = |expected, found: &str| {
        Err(PartError::File { path: path.clone(), expected, found: found.to_owned() })
    };
    if bytes.len() > FILE_BYTES {
        return wrong("at most 4 MiB; keep large user-data in its own file, named by `source`", "more");
    }
    let mut value = match parser::yaml(&bytes) {
        Ok(value @ Value::Object(_)) => value,
        // An empty file asks for a record, and adds nothing to it.
        Ok(Value::Null) => json!({}),
        Ok(_) => return wrong("a mapping, part of a record", "something else"),
        Err(error) => return wrong("a mapping in YAML", &parser::fault_of_yaml(&bytes, &error)),
    };
    for field in PAYLOADS {
        let Some(source) = value[field]["source"]["file"].as_str() else { continue };
        saw(&files.join(source));
        let bytes = payload(files, source)?;
        value[field] = json!({"base64": STANDARD.encode(bytes)});
    }
    Ok(Some(value))
}

/// Reads the source of a payload. It follows links, but not out of the directory.
fn payload(files: &Path, source: &str) -> Result<Vec<u8>, PartError> {
    let path = files.join(source);
    let unreadable = |error| io_error(&path, "a file that can be read, named by `source`", error);
    let real = path.canonicalize().map_err(unreadable)?;
    let wrong = |expected, found: &str| {
        Err(PartError::File { path: path.clone(), expected, found: found.to_owned() })
    };
    if !real.starts_with(files.canonicalize().map_err(unreadable)?) {
        return wrong("a file inside the directory of the part that names it", "a way out of it");
    }
    let most = USER_DATA_MAX as usize;
    match read(&real, most).map_err(unreadable)? {
        Some(bytes) if bytes.len() <= most => Ok(bytes),
        Some(_) => wrong("at most 1 MiB; gzip is taken by cloud-init", "more"),
        None => Err(unreadable(Errno::NOENT.into())),
    }
}

/// Says that a path is a symbolic link that leads nowhere; `None` if it is not.
pub(crate) fn dangling(path: &Path) -> Option<String> {
    let target = std::fs::read_link(path).ok()?;
    let is_missing = std::fs::metadata(path).is_err_and(|error| error.kind() == io::ErrorKind::NotFound);
    let hidden = match is_home(&target) {
        true => " for the agent (the package's unit hides /root, /home and /run/user with `ProtectHome=yes`)",
        false => "",
    };
    is_missing.then(|| format!("a symbolic link to {}, which does not exist{hidden}", target.display()))
}

/// What a file is if it is not a regular one, and the remedy.
fn irregular(metadata: &Metadata) -> Option<String> {
    let kind = metadata.file_type();
    if kind.is_file() {
        return None;
    }
    let kind = match (kind.is_dir(), kind.is_fifo()) {
        (true, _) => "a directory",
        (_, true) => "a FIFO",
        _ => "a device or a socket",
    };
    Some(format!("{kind}, not a regular file; remove it, give it another name, or put a file in its place"))
}

/// Opens a regular file. A FIFO does not block the caller (fifo(7)).
///
/// # Errors
/// The file cannot be opened, or is not a regular one.
pub(crate) fn open_regular(path: &Path) -> io::Result<(File, Metadata)> {
    let opened = OpenOptions::new().read(true).custom_flags(libc::O_NONBLOCK).open(path);
    let file = opened.map_err(|error| {
        // A socket cannot be opened (open(2), ENXIO).
        let found = std::fs::metadata(path).ok().as_ref().and_then(irregular);
        found.map_or(error, io::Error::other)
    })?;
    let metadata = file.metadata()?;
    match irregular(&metadata) {
        Some(found) => Err(io::Error::other(found)),
        None => Ok((file, metadata)),
    }
}

/// Reads at most `limit + 1` bytes of a regular file; `None` if it does not exist.
///
/// # Errors
/// The file cannot be read, or is a symbolic link that leads nowhere: its writer meant it to have content.
pub(crate) fn read(path: &Path, limit: usize) -> io::Result<Option<Vec<u8>>> {
    let file = match open_regular(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            return dangling(path).map_or(Ok(None), |found| Err(io::Error::other(found)));
        }
        opened => opened?.0,
    };
    let mut bytes = Vec::new();
    File::take(file, limit as u64 + 1).read_to_end(&mut bytes)?;
    Ok(Some(bytes))
}

/// False if no source configures addresses. The guest then falls back to its defaults, mostly DHCP on its first NIC,
/// instead of disabling every NIC.
pub(crate) fn tells_of_network(record: &Value) -> bool {
    let network = &record["network"];
    let nics = network["nics"].as_array().map(Vec::as_slice).unwrap_or_default();
    !network["mode"].is_null() || nics.iter().any(|nic| !nic["addresses"].is_null())
}

/// Derives a host name from a VM's name: its first label, with hyphens for invalid characters.
pub(crate) fn label(name: &str) -> String {
    let first = name.split('.').next().unwrap_or_default();
    let letters = first.chars().map(|c| if c.is_ascii_alphanumeric() { c.to_ascii_lowercase() } else { '-' });
    let label: String = letters.skip_while(|c| *c == '-').take(63).collect();
    let label = label.trim_end_matches('-');
    if label.is_empty() { "vm".into() } else { label.into() }
}

/// Fields of the SMBIOS tables by which guests know a cloud; absent ones are empty.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct SmbiosFields<'a> {
    /// Serial of the system.
    pub(crate) serial: &'a str,
    /// Manufacturer of the system.
    pub(crate) manufacturer: &'a str,
    /// Product of the system.
    pub(crate) product: &'a str,
    /// Asset tag of the chassis.
    pub(crate) asset: &'a str,
}

/// The cloud that the firmware names, if a record has a value for it. cloud-init's `ds-identify` reads the same fields.
pub(crate) fn stamp(firmware: &SmbiosFields<'_>) -> Option<&'static str> {
    let is_nova = |text: &str| matches!(text, "OpenStack Nova" | "OpenStack Compute");
    match () {
        () if firmware.serial.contains("ds=nocloud-net") => Some("nocloud-net"),
        () if firmware.serial.contains("ds=nocloud") => Some("nocloud"),
        () if is_nova(firmware.product) || is_nova(firmware.asset) => Some("openstack"),
        () if firmware.manufacturer == "Amazon EC2" => Some("ec2"),
        () => None,
    }
}

// Merges one part of a record into another.

/// Mappings that are replaced as a whole, because a mixture of two would be invalid.
const WHOLE: [&str; 9] = [
    "iam",
    "managed_identity",
    "random_seed",
    "raw",
    "service_account",
    "signing",
    "user_data",
    "vendor_data",
    "vendor_data2",
];

/// Parses the record of several parts. `compose` makes it of all of them, or of all but one. The error names the only
/// part without which the record is valid, or else `whole`; a part that has no name is never named. Errors and warnings
/// about a NIC name it by its ID, because nobody counted the NICs of the whole.
pub(crate) fn parse_composed(
    limits: &RecordLimits,
    (whole, names): (&str, &[Option<String>]),
    compose: impl Fn(Option<usize>) -> Value,
) -> Result<(Record, Vec<Warning>), RecordError> {
    let parse = |without| Record::parse_within(limits, whole, &compose(without).to_string());
    let place_of = |part: &str, field: &str| match id_of_nic(&compose(None), field) {
        Some(id) => format!("{part}, NIC {id}"),
        None => part.to_owned(),
    };
    match parse(None) {
        Ok((record, mut warnings)) => {
            for warning in &mut warnings {
                warning.place.source = place_of(whole, &warning.place.field);
                warning.place.position = None;
            }
            Ok((record, warnings))
        }
        Err(error) => {
            let is_cause =
                |(part, name): &(usize, &Option<String>)| name.is_some() && parse(Some(*part)).is_ok();
            let cause = names.iter().enumerate().find(is_cause).and_then(|(_, name)| name.as_deref());
            let place = place_of(cause.unwrap_or(whole), error.field());
            Err(error.in_part(&place))
        }
    }
}

/// The ID of the NIC that a field such as `network.nics[1].mac` is of.
fn id_of_nic(record: &Value, field: &str) -> Option<String> {
    let (number, _) = field.strip_prefix("network.nics[")?.split_once(']')?;
    let id = record["network"]["nics"].get(number.parse::<usize>().ok()?)?["id"].as_str()?;
    Some(metadata_content::record::values::excerpt(id).to_string())
}

/// NICs that the entries of a part may merge into. A record has at most 32, so one with more is refused whatever its
/// later entries merge into, and the comparisons stay few.
pub const MERGED_NICS: usize = 256;

/// Merges `over` into `base`: mappings merge, other values replace, and `null` removes. An entry of `nics` merges into
/// the entry with its `mac`, or else with its `id`; other entries are appended.
///
/// The parsers of both parts limit the depth of nesting, and so the recursion.
pub fn merge(base: &mut Value, over: Value) {
    match (base, over) {
        (Value::Object(base), Value::Object(over)) => merge_fields(base, over),
        (base, over) => *base = over,
    }
}

fn merge_fields(base: &mut Map<String, Value>, over: Map<String, Value>) {
    for (name, value) in over {
        match (base.get_mut(&name), value) {
            (_, Value::Null) => drop(base.remove(&name)),
            (Some(Value::Array(nics)), Value::Array(others)) if name == "nics" => merge_nics(nics, others),
            (there, Value::Object(fields)) if !WHOLE.contains(&&*name) => match there {
                Some(Value::Object(there)) => merge_fields(there, fields),
                _ => {
                    let mut whole = Map::new();
                    merge_fields(&mut whole, fields);
                    base.insert(name, whole.into());
                }
            },
            (_, value) => drop(base.insert(name, value)),
        }
    }
}

fn merge_nics(nics: &mut Vec<Value>, others: Vec<Value>) {
    for other in others {
        let same = |field: &str| {
            let wanted = other.get(field)?.as_str()?;
            nics.iter().take(MERGED_NICS).position(|nic| {
                nic.get(field).and_then(Value::as_str).is_some_and(|found| found.eq_ignore_ascii_case(wanted))
            })
        };
        match same("mac").or_else(|| same("id")) {
            Some(at) => merge(&mut nics[at], other),
            None => nics.push(other),
        }
    }
}

/// Names the NICs that were added without an id.
pub(crate) fn name_nics(record: &mut Value) {
    let Some(nics) = record.pointer_mut("/network/nics").and_then(Value::as_array_mut) else { return };
    for (index, nic) in nics.iter_mut().enumerate() {
        if let Some(nic) = nic.as_object_mut() {
            nic.entry("id").or_insert_with(|| format!("other{index}").into());
        }
    }
}
