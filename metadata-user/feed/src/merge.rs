//! Merges one part of a record into another.

use serde_json::{Map, Value};

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
