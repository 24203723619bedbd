"""The paper's figures and claims, each with our value, the paper's, the error and a verdict."""
