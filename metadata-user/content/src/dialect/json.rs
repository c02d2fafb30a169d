//! Builds JSON values by moving their parts.

/// Like `serde_json::json!`, but moves the parts, which must implement `Into<Value>`. `serde_json::json!` serialises
/// each part, and so copies a document once per level.
macro_rules! json {
    (null) => { serde_json::Value::Null };
    ([ $($element:expr),* $(,)? ]) => {
        serde_json::Value::Array(vec![$(serde_json::Value::from($element)),*])
    };
    ({}) => { serde_json::Value::Object(serde_json::Map::new()) };
    ({ $($members:tt)* }) => {{
        let mut object = serde_json::Map::new();
        $crate::dialect::json::members!(object $($members)*);
        serde_json::Value::Object(object)
    }};
    ($value:expr) => { serde_json::Value::from($value) };
}

/// Adds pairs `name: value` to an object.
macro_rules! members {
    ($object:ident) => {};
    ($object:ident $name:literal : null $(, $($others:tt)*)?) => {
        $crate::dialect::json::members!(@ $object $name (null) $($($others)*)?)
    };
    ($object:ident $name:literal : [ $($value:tt)* ] $(, $($others:tt)*)?) => {
        $crate::dialect::json::members!(@ $object $name ([ $($value)* ]) $($($others)*)?)
    };
    ($object:ident $name:literal : { $($value:tt)* } $(, $($others:tt)*)?) => {
        $crate::dialect::json::members!(@ $object $name ({ $($value)* }) $($($others)*)?)
    };
    ($object:ident $name:literal : $value:expr $(, $($others:tt)*)?) => {
        $crate::dialect::json::members!(@ $object $name ($value) $($($others)*)?)
    };
    (@ $object:ident $name:literal ($($value:tt)*) $($others:tt)*) => {
        $object.insert($name.to_owned(), $crate::dialect::json::json!($($value)*));
        $crate::dialect::json::members!($object $($others)*)
    };
}

pub(super) use {json, members};

#[cfg(test)]
mod tests {
    #[test]
    fn the_macro_builds_the_same_value_as_serde_jsons() {
        let (text, list) = ("x".to_owned(), vec![1, 2]);
        let wanted = serde_json::json!({
            "none": null, "no": {}, "empty": [], "text": text, "of": { "list": list, "more": [text, "y"] },
            "last": { "number": 1 + 1 },
        });
        let made = super::json!({
            "none": null, "no": {}, "empty": [], "text": text.as_str(),
            "of": { "list": list, "more": [text, "y"] }, "last": { "number": 1 + 1 },
        });
        assert_eq!(made, wanted);
    }
}
