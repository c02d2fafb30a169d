//! The attribute of tests that need privileges, in a crate of its own because the compiler runs it.

use proc_macro::{Delimiter, Group, TokenStream, TokenTree};

/// Makes a function a test that is skipped where it cannot run, as `privileged::or_skip` of the crate `testbed` decides.
///
/// ```ignore
/// #[privileged::test]
/// fn a_tap_can_be_made() {}
///
/// #[privileged::test(may_run)] // `fn may_run() -> bool` decides, which asks for a tool too
/// fn a_pod_can_be_made() {}
/// ```
#[proc_macro_attribute]
pub fn test(guard: TokenStream, function: TokenStream) -> TokenStream {
    let guard = if guard.is_empty() { "privileged::or_skip".to_owned() } else { guard.to_string() };
    let parsed = |text: &str| text.parse::<TokenStream>().unwrap_or_default();
    let mut tokens: Vec<TokenTree> = function.into_iter().collect();
    let Some(TokenTree::Group(body)) = tokens.pop() else {
        return parsed("compile_error!(\"expected a function with a body\");");
    };
    let check = parsed(&format!("if !{guard}() {{ return; }}"));
    let mut guarded = Group::new(Delimiter::Brace, check.into_iter().chain(body.stream()).collect());
    guarded.set_span(body.span());
    parsed("#[test]").into_iter().chain(tokens).chain([guarded.into()]).collect()
}
