//! Estimates from above how much memory a rendered record takes.

use std::hash::BuildHasher as _;
use std::io;
use std::sync::LazyLock;

use bytes::Bytes;
use foldhash::fast::RandomState;
use serde::Serialize;
use serde_json::Value;

use metadata_content::record::{Carried, Dialect, Record};

/// Octets of any record and its responses: routes, heads, tables, a slot, a mailbox.
pub const RECORD_OCTETS: usize = 20 << 10;
/// Copies of a record's text (JSON, without payloads): the record itself, and the dialects' documents.
pub const TEXT_FACTOR: usize = 10;
/// Octets of a payload's allocations beside its content.
const CONTENT_OCTETS: usize = 512;

/// Octets that wrap gzip data in a text field.
const WRAPPING: usize = 128;

/// Distinguishes contents by a keyed hash, which no guest can predict. Two contents that collide by chance would be
/// charged once.
static HASHER: LazyLock<RandomState> = LazyLock::new(RandomState::default);

/// Octets that several records may share, by hash and length.
pub(super) type Content = (u64, usize);

/// The memory of a record.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Weight {
    own: usize,
    contents: Vec<(Content, usize)>,
}

impl Weight {
    /// The memory of a record whose payloads are complete.
    #[must_use]
    pub fn of(record: &Record) -> Self {
        let mut text = record.clone();
        let mut contents = Vec::new();
        for payload in [&mut text.user_data, &mut text.vendor_data, &mut text.vendor_data2] {
            let octets = payload.take().and_then(|payload| payload.bytes());
            contents.extend(octets.map(|octets| (octets, true)));
        }
        contents.extend(text.files.iter_mut().map(|file| (std::mem::take(&mut file.base64.0), false)));
        let mut seen = Vec::with_capacity(contents.len());
        for (octets, in_documents) in contents {
            let content = (HASHER.hash_one(&octets[..]), octets.len());
            if seen.iter().all(|(other, _)| *other != content) {
                seen.push((content, taken(&octets, in_documents, record)));
            }
        }
        let documents = [text.network.raw.as_ref(), text.network.network_data.as_ref()];
        let mut own = RECORD_OCTETS + TEXT_FACTOR * length(&text);
        own += documents.into_iter().flatten().map(held).sum::<usize>();
        // The document of a text is kept beside it, and CloudCIX serves it.
        if let (Some(Value::String(_)), Some(document)) = (&text.network.raw, text.network.raw_document()) {
            own += held(document) + TEXT_FACTOR * length(document);
        }
        Self { own, contents: seen }
    }

    /// Octets that it shares with no other record.
    #[must_use]
    pub fn own(&self) -> usize {
        self.own
    }

    /// All its octets, as if it shared nothing.
    #[must_use]
    pub fn alone(&self) -> usize {
        self.own + self.contents.iter().map(|(_, octets)| octets).sum::<usize>()
    }

    pub(super) fn contents(&self) -> &[(Content, usize)] {
        &self.contents
    }
}

/// The memory of a payload: its octets, and its copies in the dialects' documents. Equal user-data and vendor-data
/// share one content, so the charge includes the copies of both.
fn taken(octets: &Bytes, in_documents: bool, record: &Record) -> usize {
    let mut taken = octets.len() + CONTENT_OCTETS;
    if !in_documents {
        return taken;
    }
    let served = Dialect::ALL.iter().filter(|dialect| record.serve.serves(**dialect));
    let forms: Vec<Carried> =
        served.flat_map(|dialect| [dialect.user_data(), dialect.vendor_data()]).collect();
    // Dialects that carry the payload in the same form share one copy.
    let mut add = |any_of: &[Carried], octets: usize| {
        taken += if forms.iter().any(|form| any_of.contains(form)) { octets } else { 0 };
    };
    let encoded = as_base64(octets.len());
    if std::str::from_utf8(octets).is_ok() {
        add(&[Carried::InDocument, Carried::InDocumentOrBase64], escaped(octets));
        add(&[Carried::Base64, Carried::Base64Text], encoded);
    } else {
        let wrapped = encoded + WRAPPING;
        add(&[Carried::Base64, Carried::InDocumentOrBase64], encoded);
        add(&[Carried::InDocument], wrapped);
        add(&[Carried::Text], wrapped);
        add(&[Carried::Base64Text], as_base64(wrapped));
    }
    taken
}

/// Octets of a text as a JSON string.
fn escaped(octets: &[u8]) -> usize {
    let written = |octet: &u8| match octet {
        b'"' | b'\\' | b'\n' | b'\r' | b'\t' | 0x08 | 0x0c => 2,
        0..0x20 => 6,
        _ => 1,
    };
    octets.iter().map(written).sum()
}

fn as_base64(octets: usize) -> usize {
    octets.div_ceil(3) * 4
}

/// Bytes of a node of a mapping, which has room for eleven members and at least five (`alloc::collections::btree`).
const MAPPING_NODE: usize = 16 + 11 * (size_of::<String>() + size_of::<Value>());
/// Fewest members of a node of a mapping beside the first.
const MAPPING_MEMBERS: usize = 5;

/// Bytes that a parsed document takes beyond its text: a list of single digits takes sixteen times its JSON, a mapping
/// of one member a hundred times.
fn held(value: &Value) -> usize {
    match value {
        Value::Array(values) => {
            values.capacity() * size_of::<Value>() + values.iter().map(held).sum::<usize>()
        }
        Value::Object(members) => {
            members.len().div_ceil(MAPPING_MEMBERS) * MAPPING_NODE
                + members.iter().map(|(name, value)| name.capacity() + held(value)).sum::<usize>()
        }
        Value::String(text) => text.capacity(),
        Value::Null | Value::Bool(_) | Value::Number(_) => 0,
    }
}

/// Octets of a value as JSON, without writing the JSON.
pub(crate) fn length(value: &impl Serialize) -> usize {
    struct Count(usize);
    impl io::Write for Count {
        fn write(&mut self, octets: &[u8]) -> io::Result<usize> {
            self.0 += octets.len();
            Ok(octets.len())
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }
    let mut count = Count(0);
    // A path that is not UTF-8 fails the writer, but only the last few octets are then missing.
    _ = serde_json::to_writer(&mut count, value);
    count.0
}
