//! JSON values of parts that are moved into them.

/// What `serde_json::json!` makes of the same words. That one serialises each part to copy it, so a document
/// would be made anew for each level it has; here parts are all that `Value::from` takes.
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

/// Adds `name: value` to an object, as often as there are any.
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
    fn the_same_words_make_the_same_value() {
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
