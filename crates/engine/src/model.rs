//! A loaded model as hosts see it: tokens, texts and chat templates.

use std::fmt;
use std::sync::Arc;

use crate::error::{ChatTemplateError, TokenizeError};
use crate::llama::LlamaModel;

/// A token's id in the model's vocabulary.
pub type Token = i32;

/// What a model remembers of a sequence, which decides what can be undone.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum MemoryKind {
    /// Every position, in every layer.
    Full,
    /// Some layers keep the last positions only.
    SlidingWindow {
        /// Positions that these layers look back on.
        window: u32,
    },
    /// One state, which cannot go back.
    Recurrent,
    /// Layers of both kinds.
    Hybrid,
}

impl MemoryKind {
    /// Whether the last positions of a sequence can be removed exactly.
    #[must_use]
    pub(crate) fn rolls_back(self, keeps_sliding_window: bool) -> bool {
        match self {
            Self::Full => true,
            Self::SlidingWindow { .. } => keeps_sliding_window,
            Self::Recurrent | Self::Hybrid => false,
        }
    }
}

/// One message of a conversation.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ChatMessage<'a> {
    /// `system`, `user` or `assistant`, as the model's template knows them.
    pub role: &'a str,
    /// What was said.
    pub content: &'a str,
}

/// A loaded model. Every method may be called from any thread at any time, also while the engine decodes.
#[derive(Clone)]
pub struct Model {
    pub(crate) llama: Arc<LlamaModel>,
}

impl fmt::Debug for Model {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Model").field("description", &self.description()).finish_non_exhaustive()
    }
}

impl Model {
    /// The tokens of `text`, any bytes. `add_special` puts the model's BOS and EOS where its metadata says so;
    /// `parse_special` reads the text of control tokens (such as `<|im_start|>`) as these tokens, not as text.
    ///
    /// # Errors
    /// [`TokenizeError::TooLong`] above a gibibyte; [`TokenizeError::Failed`] if llama.cpp throws.
    pub fn tokenize(
        &self,
        text: impl AsRef<[u8]>,
        add_special: bool,
        parse_special: bool,
    ) -> Result<Vec<Token>, TokenizeError> {
        self.llama.tokenize(text.as_ref(), add_special, parse_special)
    }

    /// The exact bytes of a token, of control tokens too. They need not be whole characters.
    ///
    /// # Errors
    /// [`TokenizeError::UnknownToken`] outside the vocabulary.
    pub fn token_piece(&self, token: Token) -> Result<Vec<u8>, TokenizeError> {
        let mut bytes = Vec::new();
        self.llama.append_piece(token, true, &mut bytes)?;
        Ok(bytes)
    }

    /// The bytes of a token as a completion shows them: none for control tokens.
    ///
    /// # Errors
    /// [`TokenizeError::UnknownToken`] outside the vocabulary.
    pub fn token_text(&self, token: Token) -> Result<Vec<u8>, TokenizeError> {
        self.detokenize(&[token])
    }

    /// The bytes of several tokens, one after the other; control tokens have none.
    ///
    /// # Errors
    /// [`TokenizeError::UnknownToken`] outside the vocabulary.
    pub fn detokenize(&self, tokens: &[Token]) -> Result<Vec<u8>, TokenizeError> {
        let mut bytes = Vec::new();
        for &token in tokens {
            self.llama.append_piece(token, false, &mut bytes)?;
        }
        Ok(bytes)
    }

    /// Whether `token` ends a completion (end of sequence, end of turn and their like).
    #[must_use]
    pub fn is_eog(&self, token: Token) -> bool {
        self.llama.is_eog(token)
    }

    /// Tokens in the vocabulary.
    #[must_use]
    pub fn vocabulary_size(&self) -> u32 {
        self.llama.vocabulary_size()
    }

    /// Whether [`Model::apply_chat_template`] has a template to apply.
    #[must_use]
    pub fn has_chat_template(&self) -> bool {
        self.llama.has_chat_template()
    }

    /// The text of a conversation in the model's own format; tokenize it with `parse_special`. `add_assistant` ends it
    /// where the assistant's turn begins. llama.cpp knows a list of templates, it does not interpret them.
    ///
    /// # Errors
    /// [`ChatTemplateError::None`] without a template; [`ChatTemplateError::Failed`] if llama.cpp does not know it.
    pub fn apply_chat_template(
        &self,
        messages: &[ChatMessage<'_>],
        add_assistant: bool,
    ) -> Result<Vec<u8>, ChatTemplateError> {
        self.llama.apply_chat_template(messages, add_assistant)
    }

    /// What the model remembers of a sequence.
    #[must_use]
    pub fn memory_kind(&self) -> MemoryKind {
        self.llama.memory_kind()
    }

    /// Layers of the model.
    #[must_use]
    pub fn layer_count(&self) -> u32 {
        self.llama.layer_count()
    }

    /// Bytes of all weights.
    #[must_use]
    pub fn size_bytes(&self) -> u64 {
        self.llama.size_bytes()
    }

    /// Weights.
    #[must_use]
    pub fn parameter_count(&self) -> u64 {
        self.llama.parameter_count()
    }

    /// llama.cpp's description, such as `llama 135M Q4_1`.
    #[must_use]
    pub fn description(&self) -> String {
        self.llama.description()
    }
}
