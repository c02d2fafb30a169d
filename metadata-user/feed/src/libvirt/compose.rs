//! Composes a domain's record from the domain and its files.

use std::path::{Path, PathBuf};

use metadata_content::record::{Record, RecordError, RecordLimits, Warning};
use serde_json::{Value, json};

use super::LibvirtError;
use super::domain::LibvirtDomain;
use crate::record_part::{DEFAULTS, merge, name_nics, open_mode, parse_composed, part, tells_of_network};

/// What makes a domain's record. The parts override each other in this order: the domain's devices, `defaults.yaml`,
/// the domain's metadata, its own file.
pub struct Composition {
    uuid: String,
    implied: Value,
    parts: [Option<Value>; 3],
    names: [Option<String>; 3],
    /// The files that others than their owner and its group may read, and their modes.
    pub exposed: Vec<(PathBuf, u32)>,
}

/// The record of a domain, without its generation; see [`Composition`].
///
/// # Errors
/// Like [`Composition::read`].
pub fn record(domain: &LibvirtDomain, files: &Path, every: bool) -> Result<Option<Value>, LibvirtError> {
    Ok(Composition::read(domain, files, every)?.map(|composition| composition.record()))
}

impl Composition {
    /// Reads the parts. `None` if neither the domain's metadata nor a file asks for a record, unless `every` is set.
    ///
    /// # Errors
    /// A file cannot be read, or is not part of a record. This function does not validate the whole record.
    pub fn read(domain: &LibvirtDomain, files: &Path, every: bool) -> Result<Option<Self>, LibvirtError> {
        let file = format!("{}.yaml", domain.uuid);
        let mut read = Vec::new();
        let own = part(files, &file, |path| read.push(path.to_owned()))?;
        if domain.instance.is_none() && own.is_none() && !every {
            return Ok(None);
        }
        let shown = |name: &str| Some(files.join(name).display().to_string());
        let defaults = part(files, DEFAULTS, |path| read.push(path.to_owned()))?;
        let exposed = read.into_iter().filter_map(|path| open_mode(&path).map(|mode| (path, mode)));
        Ok(Some(Self {
            uuid: domain.uuid.clone(),
            implied: domain.implied(),
            parts: [defaults, domain.instance.clone(), own],
            names: [shown(DEFAULTS), Some("the domain's <metadata>".into()), shown(&file)],
            exposed: exposed.collect(),
        }))
    }

    /// The record, without its generation.
    #[must_use]
    pub fn record(&self) -> Value {
        self.record_without(None)
    }

    fn record_without(&self, without: Option<usize>) -> Value {
        let mut record = self.implied.clone();
        let parts = self.parts.iter().enumerate().filter(|(part, _)| Some(*part) != without);
        parts.filter_map(|(_, part)| part.clone()).for_each(|part| merge(&mut record, part));
        // libvirt decides the domain's identity: `null` removes an owner, so that the UUID is the owner.
        merge(&mut record, json!({"schema": "vmrecord/1", "vm": {"uuid": self.uuid, "owner": null}}));
        name_nics(&mut record);
        if !tells_of_network(&record) {
            merge(&mut record, json!({"network": {"mode": "none"}}));
        }
        record
    }

    /// Checks the record of this generation.
    ///
    /// # Errors
    /// The record is invalid; the error names the part that makes it so, if one alone does.
    pub fn check(
        &self,
        limits: &RecordLimits,
        generation: &Value,
    ) -> Result<(Record, Vec<Warning>), RecordError> {
        parse_composed(limits, ("the record", &self.names), |without| {
            let mut record = self.record_without(without);
            record["generation"] = generation.clone();
            record
        })
    }
}
