//! The block that a VM's description may have:
//!
//! ````text
//! The shop's front end.
//!
//! ```imds
//! metadata: {role: web}
//! labels: [shop]
//! ```
//! ````
//!
//! Who may edit a VM's options (`VM.Config.Options`) may edit its description, without other rights on the node. So the
//! block may say what the guest is told about itself, and nothing that decides which guest is asked, where secrets come
//! from, or how much of the node it may use.

use metadata_content::parser;
use serde_json::{Value, json};

use super::Problem;

/// First line of the block.
const OPEN: &str = "```imds";
/// Last line of the block.
const CLOSE: &str = "```";

/// The fields of a record that the block may have.
pub const FIELDS: [&str; 4] = ["image", "instance_type", "labels", "metadata"];

/// The part of a record in a description; `None` without a block.
pub(super) fn part(description: &str) -> Result<Option<Value>, Problem> {
    let wrong = |expected, found: String| Err(Problem::Block { expected, found });
    let mut lines = description.lines();
    if !lines.any(|line| line.trim_end() == OPEN) {
        return Ok(None);
    }
    let mut text = String::new();
    loop {
        match lines.next() {
            Some(line) if line.trim_end() == CLOSE => break,
            Some(line) => {
                text.push_str(line);
                text.push('\n');
            }
            None => return wrong("a line ``` at its end", "none".into()),
        }
    }
    let fields = match parser::yaml(&text) {
        Ok(Value::Object(fields)) => fields,
        Ok(Value::Null) => return Ok(Some(json!({}))),
        Ok(_) => return wrong("a mapping in YAML", "something else".into()),
        Err(error) => {
            let line = error.line();
            return wrong("a mapping in YAML", format!("something else, from its line {line} on"));
        }
    };
    match fields.keys().find(|key| !FIELDS.contains(&key.as_str())) {
        Some(other) => {
            let found = format!("`{}`", metadata_content::record::values::excerpt(other));
            wrong("only `image`, `instance_type`, `labels` and `metadata`; others belong into a file", found)
        }
        None => Ok(Some(fields.into())),
    }
}
