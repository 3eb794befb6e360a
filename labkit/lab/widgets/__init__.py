"""Pictures with a slider: a pure function draws, plain ipywidgets show. One module a picture."""
